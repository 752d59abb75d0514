"""What `import pyramidsd` offers, and what it leaves alone."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pyramidsd


def test_all_is_what_can_be_imported() -> None:
    """Everything public that is no module, and nothing else."""
    offered = {name for name, value in vars(pyramidsd).items() if not name.startswith("_")}
    offered -= {name for name in offered if isinstance(getattr(pyramidsd, name), ModuleType)}
    assert pyramidsd.generate is not sys.modules["pyramidsd.generate"]  # the function, not its file
    assert set(pyramidsd.__all__) == offered
    assert list(pyramidsd.__all__) == sorted(offered)


def test_every_public_name_and_member_is_documented() -> None:
    for name in pyramidsd.__all__:
        public = getattr(pyramidsd, name)
        members = [value for key, value in vars(public).items() if not key.startswith("_") and callable(value)]
        for documented in (public, *members):
            text = documented.__doc__ or ""
            assert text, documented
            assert not text.startswith(f"{name}("), f"{name} has only the docstring its dataclass made"


def test_the_promised_surface_is_there() -> None:
    promised = "Chunk Draft Fuzzy Laws Level Lossless Match PromptLookup Rng Sampling Stats UsageError generate pyramid"
    assert set(promised.split()) <= set(pyramidsd.__all__)
    assert issubclass(pyramidsd.UsageError, ValueError)


def test_importing_it_imports_no_heavy_package() -> None:
    heavy = {"transformers", "rich", "platformdirs", "accelerate", "gguf"}
    program = f"import sys, pyramidsd; print(*sorted({heavy} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == []
