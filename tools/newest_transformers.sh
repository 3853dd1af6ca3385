#!/usr/bin/env bash
# make sweep-transformers: the sweep over all causal language models with the newest release of transformers, and the tests of what
# releases have changed before. Minutes; a nightly job meets a release with it before users do.
#
#   tools/newest_transformers.sh [VERSION]   VERSION: a release instead of the newest one
#
# The release goes into an environment of its own, build/newest-transformers, which takes everything else from the tests' Python. Exit 1: a
# model is wrong, crashes, is refused for another reason than the table says, or is not in the table.
set -euo pipefail
cd "$(dirname "$0")/.."
tools/setup.sh tests
python=$(cat build/setup/python)
folder=build/newest-transformers
[ -x $folder/bin/python ] || "$python" -m venv $folder
site=$($folder/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$site/tests.pth"
$folder/bin/python -m pip install --disable-pip-version-check --quiet --upgrade "transformers${1:+==$1}"
release=$($folder/bin/python -c 'import transformers; print(transformers.__version__)')
echo "transformers $release; tested: $(PYTHONPATH=python $folder/bin/python -c 'from espalier.hf.versions import TESTED; print(*TESTED)')"
status=0
PYTHONPATH=python OMP_NUM_THREADS=1 $folder/bin/python -m pytest -q -p no:cacheprovider -n "${JOBS:-$(nproc)}" \
  tests/python/test_hf_sweep.py tests/python/test_hf_checkpoints.py tests/python/test_trl_reused_keys.py || status=1
[ $status -eq 0 ] || echo "transformers $release differs from the table. Mend what is wrong, then write it: PYTHONPATH=python $folder/bin/python tests/python/test_hf_sweep.py --write"
exit $status
