"""A rank that ends while it starts, without a traceback: put it into PYTHONSTARTUP."""

import os

os.write(2, b"this is the last line of the crash\n")
os._exit(int(os.environ.get("NBDIST_TEST_EXIT", "7")))
