"""`%%distribute` and `%nbdist`: parse a line, call the session, print the result."""
