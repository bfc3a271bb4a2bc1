"""What of a traced program is written to memory, and until when it is read, as XLA fuses operations."""

import functools
from collections.abc import Collection, Mapping

from ..program import Line, Lines


VIEWS = {"reshape", "squeeze", "expand_dims", "transpose", "pcast", "pvary", "copy", "stop_gradient", "name"}
VIEWS |= {"optimization_barrier", "sharding_constraint"}
SUMS = {"reduce_sum", "reduce_max", "reduce_min", "argmax", "reduce_and", "reduce_or"}
IN_PLACE = {"scatter", "scatter-add", "scatter_add", "dynamic_update_slice", "psum", "psum_invariant", "while", "cond"}
KEEP = {"scan", "while", "scatter", "scatter-add", "scatter_add", "dynamic_update_slice", "ragged_all_to_all"}
# Operations that XLA fuses with nothing behind them, so that what they read and write is in memory.
WRITTEN = SUMS | IN_PLACE | KEEP | {"dot_general", "cond", "shard_map", "gather", "sort", "cumsum", "cumlogsumexp"}
WRITTEN |= {"cummax", "conv_general_dilated", "ragged_dot", "ragged_dot_general", "pallas_call", "concatenate", "pad"}
WRITTEN |= {"all_gather", "all_gather_invariant", "psum_scatter", "reduce_scatter", "all_to_all", "ppermute", "top_k"}
WRITTEN |= {"random_bits", "threefry2x32", "custom_vjp_call", "custom_vmap_call", "mpmd_map", "device_put"}


def is_view(program: Lines, line: Line) -> bool:
    """Whether a line gives what it is given in another shape: a sum over dims of one entry does."""
    given = line.reads[0] if line.name == "reduce_sum" else None
    return line.name in VIEWS or (given is not None and program.size(given) == program.size(line.writes[0]))


class Uses:
    """Who makes and who reads each value, which are views of another, and which are never written to memory."""

    def __init__(self, program: Lines, views: Mapping[int, int] | None = None, unfused: Collection[str] = WRITTEN):
        """`views` are more of them than those of the same size, `unfused` operations that read from memory alone."""
        self.program, self.lines, self._unfused = program, program.lines, frozenset(unfused) - SUMS
        self.made = {value: place for place, line in enumerate(self.lines) for value in line.writes}
        self.views: dict[int, int] = dict(views or {})
        for line in self.lines:
            if is_view(program, line):
                for given, value in zip(line.reads, line.writes):
                    if given is not None and program.size(given) == program.size(value):
                        self.views[value] = given
        self.readers: dict[int, list[int]] = {}
        for place, line in enumerate(self.lines):
            if not (line.writes and line.writes[0] in self.views):
                for given in line.reads:
                    if given is not None:
                        self.readers.setdefault(self.root(given), []).append(place)
        self.results = {self.root(value) for value in program.results if value is not None}
        self._taps = functools.cache(self._found_taps)
        self.fused = {value for value in self.made if self._is_fused(value)}
        self.last = functools.cache(self._last)

    def root(self, value: int | None) -> int:
        """The value that another is a view of, or it itself."""
        while value in self.views:
            value = self.views[value]
        return -1 if value is None else value

    def maker(self, value: int | None) -> Line | None:
        """The line that makes a value; None for what a program is given."""
        place = self.made.get(self.root(value))
        return None if place is None else self.lines[place]

    def _is_fused(self, value: int) -> bool:
        line = self.lines[self.made[value]]
        if value in self.views or value in self.results or line.name in WRITTEN:
            return False
        if self._is_convolved(value):
            return False
        readers = {self.lines[place].name for place in self.readers.get(value, [])}
        if line.name in ("broadcast_in_dim", "iota"):
            return readers.isdisjoint(KEEP)
        if line.name == "convert_element_type":  # a lookup casts what it finds
            readers -= {"gather"}
        return readers.isdisjoint(self._unfused)

    def _is_convolved(self, value: int) -> bool:
        """Whether a sum reads an array more than once, as a convolution does, and is read by more than one line.

        It is written, as that is read in less time than the array again and again.
        """
        if self.lines[self.made[value]].name != "add" or len(set(self.readers.get(value, []))) < 2:
            return False
        read: dict[int, int] = {}
        for source, tap in self._taps(value):
            read[source] = read.get(source, 0) + self.program.size(tap)
        return any(size > self.program.size(source) for source, size in read.items())

    def _found_taps(self, value: int) -> frozenset[tuple[int, int]]:
        """The slices that an elementwise value is computed from, each behind what it is of."""
        line, found = self.lines[self.made[value]], set[tuple[int, int]]()
        if line.name in WRITTEN:
            return frozenset()
        for given in map(self.root, line.reads):
            if line.name == "slice":
                found.add((given, value))
            elif given in self.made and not self._is_convolved(given):
                found |= self._taps(given)
        return frozenset(found)

    def _last(self, value: int) -> int:
        """The place of the last line that reads a value, also by way of what is never written."""
        if value in self.results:
            return len(self.lines)
        found = self.made.get(value, -1)
        for place in self.readers.get(value, []):
            through = (self.last(one) for one in map(self.root, self.lines[place].writes) if one in self.fused)
            found = max(found, place, *through)
        return found
