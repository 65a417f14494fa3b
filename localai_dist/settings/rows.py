"""Rows that several tables have: what must be the same for every daemon of a cluster is said once."""

from __future__ import annotations

from functools import partial

from localai_dist.settings.kinds import DURATION, SWITCH, TEXT, URLS
from localai_dist.settings.option import option
from localai_dist.units import SECOND

_lab_knob = partial(option, DURATION, zero_is_default=True, lab=True)

register_to = partial(option, URLS, (), "The frontends' address, or several; required.")
require_auth = partial(option, SWITCH, False, "Refuse to start without a registration token.")
backend_galleries = partial(
    option, TEXT, "", "Backend galleries as a JSON list of {name, url}; empty: the one in the box."
)

heartbeat_interval = partial(_lab_knob, 10 * SECOND, "How often this node reports.")
tunnel_keepalive = partial(
    _lab_knob, 5 * SECOND, "Silence on the tunnel before it is pinged; three times that without a byte ends it."
)
drain_timeout = partial(_lab_knob, 30 * SECOND, "On SIGTERM: the longest everything together may take.")

storage_bucket = partial(option, TEXT, "localai", "The bucket in it.")
storage_region = partial(option, TEXT, "us-east-1", "The region its signatures name.")
storage_access_key = partial(option, TEXT, "", "Its access key; empty: nothing is signed.", secret=True)
storage_secret_key = partial(option, TEXT, "", "Its secret key.", secret=True)
