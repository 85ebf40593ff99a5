"""Random numbers that `fn` draws: whether they are the run's own, or of a generator that `fn` has seeded.

Under vmap one draw serves all samples, each with numbers of its own. Where `fn` seeds a generator, every sample is
to draw the same, as it does when samples run one after the other: so they do.
"""

from collections.abc import Callable, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..factors.assumptions import are_for_others
from ..torch_.tracing import dispatch_modes
from ..torch_.watching import seedings
from .problem import generators
from .signals import NeedsLoop

_NAMES = (
    "alpha_dropout alpha_dropout_ bernoulli bernoulli_ binomial cauchy_ dropout dropout_ dropout1d dropout2d dropout3d "
    "exponential_ feature_alpha_dropout feature_alpha_dropout_ feature_dropout feature_dropout_ fractional_max_pool2d "
    "fractional_max_pool3d geometric_ gumbel_softmax log_normal_ multinomial native_dropout normal normal_ poisson "
    "rand rand_like randint randint_like randn randn_like random_ randperm rrelu rrelu_ uniform_ _sample_dirichlet "
    "_standard_gamma scaled_dot_product_attention"
)
RANDOM = frozenset(
    function
    for name in _NAMES.split()
    for home in (torch, torch.Tensor, F)
    if (function := getattr(home, name, None)) is not None
)


_is_cpu: Callable[[Tensor], bool] = attrgetter("is_cpu")
_ATTENTION = F.scaled_dot_product_attention


def draws(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether a call of one of these functions may draw."""
    return func is not _ATTENTION or bool(kwargs.get("dropout_p", args[4] if len(args) > 4 else 0))


class Draws:
    """Notices where `fn` seeds a default generator, which then does not go on from its last draw."""

    def __init__(self, params: Sequence[Tensor], randomness: str) -> None:
        self.params = params
        self.elsewhere: dict[torch.device, Tensor] = {}
        self.watches = randomness == "different" and (not dispatch_modes() or are_for_others())
        if self.watches:
            self.seedings = seedings()
            if not all(map(_is_cpu, params)):
                self.elsewhere = self._states()

    def _states(self) -> dict[torch.device, Tensor]:
        """The states of generators off the CPU, where seeding is not noticed as such."""
        return {device: state for device, state in generators(self.params).items() if device.type != "cpu"}

    def before(self, generator: Any) -> None:
        """A draw is about to happen, from `generator` or from the default ones."""
        if not self.watches:
            return
        if generator is not None:
            raise NeedsLoop("fn draws from a generator of its own")
        self.check()
        if self.elsewhere:
            now = self._states()
            if not all(torch.equal(state, now[device]) for device, state in self.elsewhere.items()):
                raise NeedsLoop("fn seeds the random numbers that it draws")

    def after(self) -> None:
        """A draw, or something that may have drawn, is over."""
        if self.elsewhere:
            self.elsewhere = self._states()

    def check(self) -> None:
        """Raise where `fn` has seeded; also for draws that the mode does not see."""
        if self.watches and seedings() != self.seedings:
            raise NeedsLoop("fn seeds the random numbers that it draws")
