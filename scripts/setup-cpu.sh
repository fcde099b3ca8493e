#!/usr/bin/env bash
# Makes .venv for development and for the demo on a CPU. Safe to run again: it does nothing while
# pyproject.toml, requirements-cpu.txt and this script are what they were when .venv was made.
#
#   PYTHON=python3.12 scripts/setup-cpu.sh    another interpreter (3.11 or newer) for a new .venv
#
# Whether torch comes as a CPU or as a CUDA build depends on where pip is configured to look. Both work;
# the CUDA build is several gigabytes larger.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=.venv
stamp=$venv/.wavepp-setup
packages='python3 python3-venv git make'

say() { printf 'setup: %s\n' "$*"; }
die() {
    printf 'setup: error: %s\n' "$*" >&2
    exit 1
}

python=${PYTHON:-python3}
[ -x $venv/bin/python ] && python=$venv/bin/python
command -v "$python" >/dev/null ||
    die "$python not found: install Python 3.11 or newer (Debian, Ubuntu: apt install $packages) or set PYTHON"
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' ||
    die "$python is $("$python" -c 'import platform; print(platform.python_version())'), but 3.11 or newer is" \
        "needed: set PYTHON to one (and remove $venv if it was made with the old one)"

wanted=$("$python" - pyproject.toml requirements-cpu.txt scripts/setup-cpu.sh <<'PY'
import hashlib, pathlib, sys
print(hashlib.sha256(b"\0".join(pathlib.Path(name).read_bytes() for name in sys.argv[1:])).hexdigest())
PY
)
if [ -f $stamp ] && [ "$(cat $stamp)" = "$wanted" ]; then
    say "$venv is up to date"
    exit 0
fi

if [ ! -x $venv/bin/python ]; then
    say "creating $venv"
    "$python" -c 'import venv, ensurepip' 2>/dev/null ||
        die "$python cannot make virtual environments (Debian, Ubuntu: apt install $packages)"
    "$python" -m venv $venv || die "could not create $venv (Debian, Ubuntu: apt install $packages)"
fi
$venv/bin/python -m pip --version >/dev/null 2>&1 || die "$venv has no working pip: remove it and run this again"

# sglang's own requirements want GPU packages: without --no-warn-conflicts pip lists every one it misses.
install() {
    $venv/bin/python -m pip install -q --disable-pip-version-check --no-warn-conflicts "$@" ||
        die "pip install $* failed"
}

say 'installing torch and what sglang needs on a CPU (the largest part)'
install torch==2.13.0 -r requirements-cpu.txt
say 'installing sglang'
install --no-deps sglang==0.5.23 torchvision==0.28.0
say 'installing the tools for the tests'
mapfile -t tools < <($venv/bin/python - <<'PY'
import tomllib
with open("pyproject.toml", "rb") as file:
    print(*tomllib.load(file)["project"]["optional-dependencies"]["test"], sep="\n")
PY
)
install "${tools[@]}"
say 'installing this package'
install --no-deps -e .

say 'making the CPU platform the default of this environment'
site=$($venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
printf 'import os; os.environ.setdefault("SGLANG_PLATFORM", "wavepp-cpu")\n' >"$site/wavepp-cpu.pth"

printf '%s\n' "$wanted" >$stamp
say "done: $venv/bin/wavepp"
