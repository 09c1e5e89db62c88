"""A rank that takes long to start: put it into PYTHONSTARTUP.

NBDIST_TEST_SLOW_S says how long; the default is for ever.
"""

import os
import threading

threading.Event().wait(float(os.environ.get("NBDIST_TEST_SLOW_S", "600")))
