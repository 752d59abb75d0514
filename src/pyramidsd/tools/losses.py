"""What an answer costs against the target alone: regret, and the divergence of the laws its tokens were drawn from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from pyramidsd.generate import Chunk
from pyramidsd.sampling import Sampling


class Losses:
    """What the tokens of one answer cost, against the target alone; nothing of it needs a label.

    kl: KL(law || target's law) in nats, of the law each token was really drawn from. None for a greedy answer, whose
        laws are one-hot (it would be 0 or infinite), and of a token where it is infinite.
    regret: max log p - log p(token) in nats, with p the target's own law at temperature 1.
    chosen: whether the token is the target's most probable one.

    Args:
        sampling: how the target draws.
    """

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._kl: list[Tensor] = []
        self._regret: list[Tensor] = []

    def watch(self, chunk: Chunk) -> None:
        """See one chunk, before its laws are dropped. The clock is running: nothing waits for the accelerator here."""
        if not len(chunk.laws):  # another library's answer
            return
        rows_ = _precise(chunk.laws.logits)
        tokens = torch.tensor(chunk.token_ids).unsqueeze(-1).to(rows_.device, non_blocking=True)
        self._regret.append(rows_.amax(-1) - rows_.gather(-1, tokens).squeeze(-1))
        if self._sampling.temperature > 0:
            target = self._sampling.laws(chunk.laws.logits, []).probs  # no processors, so no context
            self._kl.append(kl(_precise(chunk.laws.probs), _precise(target)))

    def line(self) -> dict[str, Any]:
        """What a record says: lists with an entry per token, None for an answer without laws."""
        regret = _listed(self._regret)
        chosen = None if regret is None else [value == 0 for value in regret]
        return {"kl": _listed(self._kl), "regret": regret, "chosen": chosen}


def kl(law: Tensor, other: Tensor) -> Tensor:
    """KL(law || other) in nats, row by row; infinite where `other` excludes what `law` does not."""
    law, other = law / law.sum(-1, keepdim=True), other / other.sum(-1, keepdim=True)
    return torch.where(law > 0, law * (law.log() - other.log()), 0.0).sum(-1).clamp_min(0)


def _precise(values: Tensor) -> Tensor:
    return values.float() if values.device.type == "mps" else values.double()  # MPS has no float64


def _listed(parts: Sequence[Tensor]) -> list[float | None] | None:
    values = torch.cat([*parts]).tolist() if parts else None
    return values and [float(f"{value:.6g}") if math.isfinite(value) else None for value in values]
