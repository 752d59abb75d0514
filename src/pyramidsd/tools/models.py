"""List what is usable here, and fetch the embedded target."""

from __future__ import annotations

import argparse
import json

import torch
from rich.table import Table

from pyramidsd.models.embedded import EMBEDDED, fetch, folder, is_fetched
from pyramidsd.models.hf import quiet
from pyramidsd.tools.terminal import busy, out


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of this verb."""
    parser.add_argument("--fetch", choices=EMBEDDED, metavar="NAME", help="download a model and convert it once")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    """Fetch if asked, then list."""
    quiet()
    if args.fetch:
        with busy(f"Fetching {args.fetch} ({EMBEDDED[args.fetch].megabytes} MB) and converting it"):
            fetch(args.fetch)
    rows = [
        {
            "name": name,
            "about": model.about,
            "state": "ready" if is_fetched(name) else f"fetch with: pyramidsd models --fetch {name}",
            "folder": str(folder(name)),
        }
        for name, model in EMBEDDED.items()
    ]
    devices = ["cpu"]
    devices += ["cuda"] if torch.cuda.is_available() else []
    devices += ["mps"] if torch.backends.mps.is_available() else []
    if args.json:
        print(json.dumps({"models": rows, "devices": devices}))  # noqa: T201
        return 0
    table = Table("model", "what it is", "state")
    for row in rows:
        table.add_row(row["name"], row["about"], row["state"])
    out.print(table)
    out.print("Any decoder-only transformers model works too: a folder, a GGUF file, or a name on the hub.")
    out.print(f"Devices: {', '.join(devices)}")
    return 0
