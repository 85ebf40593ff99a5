"""Costs from shapes, and the choices made from them. `explain` shows each choice."""

from typing import NamedTuple

TILE = 4 << 20  # bytes: gradients, or patches, written out at once; larger ones leave the cache
WORKSPACE = 16 << 20  # bytes: what a strategy may hold at once; malloc keeps blocks of this size for reuse

SMALL = 1 << 16  # bytes of an input: with less, a call's own overhead is what counts
SMALL_HELD = 1 << 18  # bytes of all factors: with less, it does not matter which of them goes first
ELEMENT = 16  # multiply-adds of a matrix product that take as long as one of a product element by element
SMALL_TOTAL = 1 << 22  # bytes of cotangents that may be held for that


class Plan(NamedTuple):
    """A choice: the strategy's name, its multiply-adds, its workspace in bytes."""

    strategy: str
    flops: int
    workspace: int


class ConvGeometry(NamedTuple):
    """A convolution but for its sizes; one entry per spatial axis."""

    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int


def tile(bytes_each: int) -> int:
    """How many samples' gradients make a tile; one always does."""
    return max(1, TILE // max(1, bytes_each))


def keeps_dense(held: int, dense: int) -> bool:
    """Whether to keep gradients in place of their factor, from the bytes of either.

    Where gradients are about as small as the factor (a convolution over many positions), norms need them written
    out anyway, and a weighted sum of them is cheaper than of the factor.
    """
    return dense <= 1.25 * held


def gram_block(t: int) -> int:
    """How many of T positions meet as many others at once, in a block of at most 1024 x 1024 products."""
    return max(1, min(t, 1024))


def gram_strip(t: int) -> int:
    """How many of T positions meet all up to themselves at once, in a strip of at most 2^20 products.

    A quarter of them: 5/8 of all pairs. Of 64, 32, 16: 1.7, 1.7 and 2.2 ms for 8 x 128 positions of width 1024.
    """
    return max(1, min(t, max(64, t // 4), (1 << 20) // max(t, 1)))


def outer_norms(n: int, t: int, i: int, o: int, itemsize: int) -> Plan:
    """How to get squared norms of sums of T outer products, O x I each.

    gram   inner products of the positions with each other, each pair once: T^2 / 2 (I + O) multiply-adds.
    tiles  the gradients written out, a few samples at a time: T I O.
    """
    strip = gram_strip(t)
    gram, tiles = t * (t + strip) // 2 * (i + o), t * i * o
    if t > 0 and gram <= tiles:
        return Plan("gram", n * gram, min(n, tile(8 * strip * t)) * 8 * strip * t)
    return Plan("tiles", n * tiles, min(n, tile(i * o * itemsize)) * i * o * itemsize)


def along(k: int, t: int) -> Plan:
    """How to get inner products of sums of T outer products with K directions; costs for one number of a direction.

    products  each position with each direction: K T multiply-adds.
    tiles     the gradients written out, a few samples at a time, then with all directions: T + K.
    """
    return Plan("products", k * t, 0) if k * t <= t + k else Plan("tiles", t + k, TILE)


def sketch_piece(n: int, t: int, row_bytes: int) -> tuple[int, int]:
    """Of how many samples, and how many rows, sums of T outer products are written out at once to be sketched.

    One product for each number: parts that stay in the cache, of many samples, as every sample costs a call less.
    Matrix products: larger ones, of enough rows that an input is not read more often than it is worth.
    """
    most, rows, size = (64, 1, TILE) if t == 1 else (16, 64, WORKSPACE)
    row_bytes = max(1, row_bytes)
    most = max(1, min(n, most, size // (rows * row_bytes)))
    return most, max(1, size // (most * row_bytes))


def reads_few(t: int, rows: int) -> bool:
    """Whether T rows of a table are better taken one by one than the table as a whole.

    A number that is taken alone has its sign and its place looked up.
    """
    return rows > 12 * t


def outer_dots(n: int, t: int, m: int, s: int, o: int, i: int, count: int = 1) -> Plan:
    """How to get N x M inner products of sums of T and of S outer products; of `count` matrices a position has one.

    gram   every position with every other of its matrix: N T M S (I + O) multiply-adds, divided by the count.
    tiles  the gradients written out, a few rows at a time: (N T + M S + count N M) I O.
    """
    gram, tiles = n * t * m * s * (i + o) // count, (n * t + m * s + count * n * m) * i * o
    if t * s > 0 and gram <= tiles:
        return Plan("gram", gram, min(n, tile(8 * t * m * s)) * 8 * t * m * s)
    return Plan("tiles", tiles, WORKSPACE)
