"""What whoever starts an island tells it, by way of one environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hpcsgd.comm import Transport
from hpcsgd.elastic import whereabouts
from hpcsgd.elastic.addresses import own_towards
from hpcsgd.elastic.meetings import Meetings

VARIABLE = "HPCSGD_ISLAND"


@dataclass(frozen=True)
class Invitation:
    """To the meetings of `islands` islands, for the one with this number."""

    island: int
    islands: int
    coordinator: str
    """host:port, or the folder that says where it is; see `whereabouts`."""
    token: str
    silence: float
    timeout: float

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    def accept(self, group: Transport) -> Meetings:
        """Collective over the ranks of the island, which are `group`."""
        host = own_towards(whereabouts.awaited(self.coordinator, self.timeout))
        return Meetings(
            self.island, group, self.coordinator, self.token, host,
            islands=self.islands, silence=self.silence, timeout=self.timeout,
        )  # fmt: skip


def invitation(environ: Mapping[str, str] = os.environ) -> Invitation | None:
    """The one that this process was started with, if any."""
    text = environ.get(VARIABLE)
    return None if text is None else Invitation(**json.loads(text))
