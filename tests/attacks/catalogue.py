"""Every attack there is."""

from tests.attacks import on_chats, on_cluster, on_holds, on_loading, on_mux, on_serving, on_takeovers, on_walking
from tests.attacks.attack import Attack

ATTACKS: tuple[Attack, ...] = (
    *on_chats.ATTACKS,
    *on_cluster.ATTACKS,
    *on_holds.ATTACKS,
    *on_loading.ATTACKS,
    *on_mux.ATTACKS,
    *on_serving.ATTACKS,
    *on_takeovers.ATTACKS,
    *on_walking.ATTACKS,
)
