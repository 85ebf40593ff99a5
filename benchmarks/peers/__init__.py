"""The contenders: a file each, and a table here. What one raises is shown in its cell."""

from . import backpack, batch, expanded, jax, loop, opacus, ours, vmap
from .peer import Peer

# A new peer is a file beside this one and a line here.
PEERS: dict[str, Peer] = {
    peer.name: peer
    for peer in (
        batch.PEER,
        loop.PEER,
        vmap.PEER,
        expanded.PEER,
        opacus.HOOKS,
        opacus.GHOST,
        backpack.PEER,
        jax.PEER,
        ours.FRESH,
        ours.REUSED,
        ours.REPLAYED,
    )
}
BASE, OURS = batch.PEER.name, (ours.FRESH.name, ours.REUSED.name, ours.REPLAYED.name)
GROWTH = (BASE, vmap.PEER.name, opacus.GHOST.name, ours.FRESH.name)  # whose cost is followed from size to size
