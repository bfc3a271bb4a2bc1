"""Normalisation of a dim that is split over devices."""

import equinox as eqx
from jaxtyping import Array, Float

from ... import nn
from .. import _send as send


_NAMES = {"means": "means of split norms", "squares": "squares of split norms"}


class SplitNorm(nn.Module):
    """A norm over dims of which this device holds a slice: the averages are taken over `axis`, one or several.

    Slices are equal, so the mean of the devices' means is the mean.
    """

    inner: nn.Norm
    axis: str | tuple[str, ...] = eqx.field(static=True)

    def __call__(self, x: Float[Array, "..."]) -> Float[Array, "..."]:
        """Normalise the trailing dims of the whole, of which `x` is a slice."""

        def mean(y: Array, what: str) -> Array:
            own, name = self.inner.mean(y, what), _NAMES[what]
            return send.vary(name, send.pmean(name, own, self.axis), self.axis)

        return self.inner.normalised(x, mean)
