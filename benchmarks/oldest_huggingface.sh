#!/usr/bin/env bash
# Runs tests/e2e/test_huggingface.py with the oldest Hugging Face libraries that are supported.
# Needs the environment that `make test` makes; what it adds goes into .venv-oldest.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
base=.venv/bin/python
[ -x "$base" ] || { echo "run 'make lint' first: it makes .venv" >&2; exit 2; }
oldest=.venv-oldest
if [ ! -f "$oldest/.installed" ]; then
    "$base" -m venv --without-pip "$oldest"
    site=$("$oldest/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
    # All else comes from the tested environment, and what that stands on, behind what is installed here.
    "$base" -c 'import sys; print(*(path for path in sys.path if path.endswith("site-packages")), sep="\n")' \
        >"$site/behind.pth"
    "$base" -m pip --python "$oldest/bin/python" install -q 'transformers==4.56.2' 'accelerate==1.10.1' \
        'huggingface_hub<1.0' 'datasets==5.0.1'
    "$base" -m pip --python "$oldest/bin/python" install -q --no-deps -e .
    touch "$oldest/.installed"
fi
"$oldest/bin/python" -c 'import accelerate, transformers; print(transformers.__version__, accelerate.__version__)'
"$oldest/bin/python" -m pytest -q tests/e2e/test_huggingface.py "$@"
