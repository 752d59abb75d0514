"""Verification rules: pure functions of two laws.

For one position let p be the verifier's law and q the draft's. A rule answers with a pair

    accept    [k, V]  the probability of keeping each token, were it the drafted one
    residual  [k, V]  the law of the token emitted at a rejection; every row sums to 1

and the law of the emitted token follows for every rule (`emitted_law`):

    law = q * accept + (1 - sum(q * accept)) * residual

A rule is exact where law = p. Otherwise TV(law, p) is what it costs, known at every token.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from pyramidsd.types import Laws, UsageError


class Rule(Protocol):
    """(p, q) -> (accept, residual), all [k, V]; p is always the verifier, q the draft."""

    def __call__(self, p: Laws, q: Laws) -> tuple[Tensor, Tensor]:
        """`accept` and `residual`."""
        ...


def emitted_law(q: Tensor, accept: Tensor, residual: Tensor) -> Tensor:
    """The law of the emitted token, [k, V], for any rule."""
    kept = q * accept
    return kept + (1 - kept.sum(-1, keepdim=True)).clamp_min(0) * residual


def total_variation(a: Tensor, b: Tensor) -> Tensor:
    """Half the summed distance of two laws, row by row: [n] in [0, 1]."""
    return (a - b).abs().sum(-1) / 2


def _normalised(mass: Tensor, fallback: Tensor) -> Tensor:
    """`mass` as a law. It vanishes only where a rejection has probability 0 (up to rounding); any law
    is right there, and `fallback` is one."""
    total = mass.sum(-1, keepdim=True)
    return torch.where(total > 0, mass / total, fallback)


def _ratio(p: Tensor, q: Tensor) -> Tensor:
    """min(1, p / q), and 1 where q = 0: such a token is never drafted."""
    return torch.where(q > 0, p / q, 1.0).clamp(max=1.0)


def _residual(p: Tensor, q: Tensor) -> Tensor:
    """(p - q)+ as a law: what the verifier gives more than the draft."""
    return _normalised((p - q).clamp_min(0), fallback=p)


def _exact_test(p: Tensor, q: Tensor) -> tuple[Tensor, Tensor]:
    """The pair that gives law p with the most acceptance, 1 - TV(p, q)."""
    return _ratio(p, q), _residual(p, q)


@dataclass(frozen=True, slots=True)
class Lossless:
    """Speculative sampling: accept min(1, p/q), residual (p - q)+ normalised. Law: p, exactly.

    At temperature 0 it keeps a drafted token iff it is the verifier's argmax.
    Leviathan et al., arXiv 2211.17192; Chen et al., arXiv 2302.01318.
    """

    def __call__(self, p: Laws, q: Laws) -> tuple[Tensor, Tensor]:
        """`accept` and `residual`."""
        return _exact_test(p.probs, q.probs)


@dataclass(frozen=True, slots=True)
class Match:
    """Assisted decoding: the verifier draws y from p, the drafted x is kept iff x = y, else y is emitted.

    As a pair: accept p, residual p (1 - q) normalised. Law: p, exactly; acceptance sum(p q), never more
    than `Lossless`. The verifier of PSD_A's first stage (arXiv 2510.12966).
    """

    def __call__(self, p: Laws, q: Laws) -> tuple[Tensor, Tensor]:
        """`accept` and `residual`."""
        return p.probs.expand_as(p.probs + q.probs), _normalised(p.probs * (1 - q.probs).clamp_min(0), fallback=p.probs)


@dataclass(frozen=True, slots=True)
class Lenient:
    """Accept min(1, p / (leniency q)), residual (p - q)+ normalised: of all residuals the one whose law is
    nearest to p. Lossy for leniency < 1: no token gets more than p / leniency.

    Attributes:
        leniency: in (0, 1]; 1 is `Lossless`.

    Leviathan et al., arXiv 2211.17192, appendix A.5.
    """

    leniency: float

    def __post_init__(self) -> None:
        if not 0 < self.leniency <= 1:
            raise UsageError(f"leniency must lie in (0, 1], got {self.leniency}; 1 is exact")

    def __call__(self, p: Laws, q: Laws) -> tuple[Tensor, Tensor]:
        """`accept` and `residual`."""
        return _ratio(p.probs, self.leniency * q.probs), _residual(p.probs, q.probs)


# Divergences. They read the raw rows, as log-probabilities `log_p`, `log_q` [k, V], so they mean the same
# at every temperature. A whole-law divergence answers [k, 1], a per-token one [k, V].


def _expectation(log_weight: Tensor, log_ratio: Tensor) -> Tensor:
    """sum(exp(log_weight) * log_ratio), where 0 * anything is 0."""
    weight = log_weight.exp()
    return torch.where(weight > 0, weight * log_ratio, 0.0).sum(-1, keepdim=True)


def _kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return _expectation(log_q, log_q - log_p)


def _reverse_kl(log_p: Tensor, log_q: Tensor) -> Tensor:
    return _expectation(log_p, log_p - log_q)


def _mean(log_p: Tensor, log_q: Tensor) -> Tensor:
    return torch.logaddexp(log_p, log_q) - math.log(2)


def _js(log_p: Tensor, log_q: Tensor) -> Tensor:
    log_m = _mean(log_p, log_q)
    return (_expectation(log_p, log_p - log_m) + _expectation(log_q, log_q - log_m)) / 2


def _fsd_js(log_p: Tensor, log_q: Tensor) -> Tensor:
    log_m = _mean(log_p, log_q)
    return (_expectation(log_m, log_m - log_p) + _expectation(log_m, log_m - log_q)) / 2


def _tv(log_p: Tensor, log_q: Tensor) -> Tensor:
    return total_variation(log_p.exp(), log_q.exp()).unsqueeze(-1)


def _logit(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p - log_q).abs()


def _prob(log_p: Tensor, log_q: Tensor) -> Tensor:
    return (log_p.exp() - log_q.exp()).abs()


@dataclass(frozen=True, slots=True)
class Divergence:
    """A distance between two rows.

    Attributes:
        measure: (log_p, log_q) -> [k, 1], or [k, V] where it looks at one token.
        largest: its upper bound; a threshold above it would accept everything.
        per_token: whether it looks at the drafted token alone.
    """

    measure: Callable[[Tensor, Tensor], Tensor]
    largest: float = math.inf
    per_token: bool = False


DIVERGENCES = {
    "js": Divergence(_js, math.log(2)),
    "fsd-js": Divergence(_fsd_js),
    "kl": Divergence(_kl),
    "reverse-kl": Divergence(_reverse_kl),
    "tv": Divergence(_tv, 1.0),
    "logit": Divergence(_logit, per_token=True),
    "prob": Divergence(_prob, 1.0, per_token=True),
}


def _head_and_rest(log_p: Tensor, log_q: Tensor, top_k: int) -> tuple[Tensor, Tensor]:
    """Both rows on p's top_k most probable tokens and one bin for the rest, [k, top_k + 1]."""
    if top_k >= log_p.shape[-1]:
        return log_p, log_q
    head = log_p.topk(top_k).indices

    def lumped(log_row: Tensor) -> Tensor:
        rest = log_row.scatter(-1, head, -torch.inf).logsumexp(-1, keepdim=True)  # 1 - the head would only be rounding
        return torch.cat([log_row.gather(-1, head), rest], -1)

    return lumped(log_p), lumped(log_q)


@dataclass(frozen=True, slots=True)
class Fuzzy:
    """Fuzzy acceptance: keep the drafted token where divergence(p, q) <= threshold, else emit from p.

    As a pair: accept 1 or 0, residual p. Law: q where kept, p elsewhere (for a per-token divergence the
    mixture that follows). The divergence reads the raw rows of both models, whatever the sampling.

    Attributes:
        threshold: from 0 to the divergence's largest value; infinity accepts everything.
        divergence:
            `js`          Jensen-Shannon, nats, at most ln 2
            `fsd-js`      (KL(m||p) + KL(m||q)) / 2 with m = (p + q) / 2, nats, unbounded: what the published
                          code of fuzzy speculative decoding computes under the name JS
            `kl`          KL(q||p), nats;  `reverse-kl`  KL(p||q), nats, the one that reproduces that paper
            `tv`          total variation, at most 1
            `logit`       |log p(x) - log q(x)| of the drafted token x, nats
            `prob`        |p(x) - q(x)| of the drafted token x, at most 1
        coupled: where the threshold refuses, run the exact test against the same law instead of refusing at
            once. The law stays what it was, more drafted tokens are kept.
        top_k: measure on p's top_k tokens and one bin for the rest; 0 takes the whole vocabulary.

    Holsman et al., arXiv 2502.20704 (there `coupled` is off); both stages of PSD_F and the second stage of
    PSD_A, arXiv 2510.12966.
    """

    threshold: float
    divergence: str = "js"
    coupled: bool = False
    top_k: int = 0

    def __post_init__(self) -> None:
        if self.divergence not in DIVERGENCES:
            raise UsageError(f"unknown divergence {self.divergence!r}; choose one of {', '.join(DIVERGENCES)}")
        known = DIVERGENCES[self.divergence]
        if not (0 <= self.threshold <= known.largest or self.threshold == math.inf):
            bound = "upwards" if known.largest == math.inf else f"to {known.largest:.4g}"
            raise UsageError(
                f"the threshold of divergence {self.divergence} goes from 0 {bound}, got {self.threshold}; "
                "inf accepts everything"
            )
        if self.top_k < 0:
            raise UsageError(f"top_k must be 0 (off) or a positive number, got {self.top_k}")
        if self.top_k and known.per_token:
            raise UsageError(f"divergence {self.divergence} looks at one token; leave top_k at 0")

    def __call__(self, p: Laws, q: Laws) -> tuple[Tensor, Tensor]:
        """`accept` and `residual`."""
        keep = (self._divergence(p, q) <= self.threshold).to(p.probs).expand_as(p.probs + q.probs)
        if not self.coupled:
            return keep, p.probs
        return _exact_test(emitted_law(q.probs, keep, p.probs), q.probs)

    def _divergence(self, p: Laws, q: Laws) -> Tensor:
        log_p, log_q = p.logits.log_softmax(-1), q.logits.log_softmax(-1)
        if self.top_k:
            log_p, log_q = _head_and_rest(log_p, log_q, self.top_k)
        known = DIVERGENCES[self.divergence]
        # Rounding must not turn a row away from a threshold at the bound.
        return known.measure(log_p, log_q).clamp(0.0, known.largest)
