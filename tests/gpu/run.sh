#!/usr/bin/env bash
# Runs the GPU checks that fit this machine and writes gpu.json and gpu.md. Installs nothing, needs
# no network.
#
#   tests/gpu/run.sh [--minutes 10] [--out DIR] [--only NAME,NAME] [--list]
#   tests/gpu/run.sh --rehearse [--ranks 2]      the same checks on CPU ranks, with tiny sizes
#
# PYTHON names the interpreter (default: python3). Results go to --out, else $OUT, else build/gpu.
set -euo pipefail
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/../.." && pwd)
PYTHON=${PYTHON:-python3}
export PYTHONPATH="$root${PYTHONPATH:+:$PYTHONPATH}"
"$PYTHON" - <<'PY' || exit 2
import sys
from importlib.util import find_spec

if sys.version_info < (3, 11):
    sys.exit(f"nbdist needs Python 3.11 or newer and {sys.executable} is older: set PYTHON.")
needed = "torch accelerate deepspeed transformers ipykernel jupyter_client IPython psutil pynvml yaml"
missing = [name for name in needed.split() if find_spec(name) is None]
if missing:
    sys.exit(f"{sys.executable} lacks {', '.join(missing)}: install nbdist there, or set PYTHON.")
PY
exec "$PYTHON" "$root/tests/gpu" "$@"
