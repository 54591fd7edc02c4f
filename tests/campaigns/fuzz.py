"""Coverage-guided fuzzing of the targets with atheris: `python tests/campaigns/fuzz.py sse -runs=100000`."""

from __future__ import annotations

import contextlib
import importlib
import pkgutil
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))


def main() -> None:
    try:
        import atheris
    except ImportError:
        sys.exit("this takes atheris: pip install atheris")
    with atheris.instrument_imports(include=["rollout_log"]):
        import rollout_log

        for module in pkgutil.walk_packages(rollout_log.__path__, "rollout_log."):
            with contextlib.suppress(ImportError):  # it needs an extra
                importlib.import_module(module.name)
        from campaigns.seeds import SEEDS
        from campaigns.targets import TARGETS
    name = sys.argv.pop(1) if len(sys.argv) > 1 else ""
    if name not in TARGETS:
        sys.exit(f"give one of {', '.join(TARGETS)}")
    corpus = Path(tempfile.mkdtemp(prefix=f"fuzz-{name}-"))  # the fuzzer leaves by exiting, so it stays
    for number, seed in enumerate(SEEDS[name]):
        (corpus / str(number)).write_bytes(seed)
    atheris.Setup([*sys.argv, str(corpus)], TARGETS[name])
    atheris.Fuzz()


if __name__ == "__main__":
    main()
