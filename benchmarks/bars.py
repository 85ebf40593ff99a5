"""The bars: what a contender's time may be, as a ratio to another's in the same run."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Bar:
    """`contender` takes at most `limit` times as long as `base`."""

    limit: float
    contender: str = "psgrad"
    base: str = "batch"


GRADS: dict[str, Bar] = {
    "mlp-tiny": Bar(3.0),
    "mlp": Bar(0.30, "psgrad out=", "vmap(grad)"),  # nearly all of it is writing N x P floats
    "resnet": Bar(1.35),
    "resnet-wide": Bar(1.25),
    "instance": Bar(1.25),
    "conv1d": Bar(1.15),
    "conv3d": Bar(1.4),
    "gpt": Bar(1.12),
    "lstm": Bar(3.0),
}
