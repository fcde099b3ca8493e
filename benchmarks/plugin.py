"""A plugin for servers under measurement: it exists only in those that get its environment."""

from __future__ import annotations

import os
from pathlib import Path


def make_plugin(folder: Path, module: str) -> dict[str, str]:
    """Have SGLang load `<module>:register` as a plugin where the returned environment is laid over.

    The entry point is written below `folder`, which has none yet.
    """
    name = module.replace(".", "-")
    info = folder / "plugin" / f"{name.replace('-', '_')}-0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[sglang.srt.plugins]\n{name} = {module}:register\n")
    paths = [str(folder / "plugin"), str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    return {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
