"""Entry point of an agent: `python -m nbdist.node`, with the ticket on its standard input."""

import sys

from nbdist.node.main import serve

serve(sys.stdin.read())
