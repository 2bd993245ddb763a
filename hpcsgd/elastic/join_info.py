"""The environment variable in which a launcher tells the ranks of its replica group how to join."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from hpcsgd.comm import Communicator

if TYPE_CHECKING:
    from hpcsgd.elastic.elastic_average import ElasticAverage

VARIABLE = "HPCSGD_REPLICA_GROUP"


@dataclass(frozen=True)
class JoinInfo:
    """The information with which replica group number `replica_group` joins the others.

    `replica_groups` is the number of groups that are started.
    """

    replica_group: int
    replica_groups: int
    coordinator: str
    """host:port of the coordinator, or the folder of files that have it; see `coordinator_address`."""
    token: str
    heartbeat_timeout: float
    timeout: float

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    def accept(self, group: Communicator) -> ElasticAverage:
        """Connect this replica group, whose ranks are `group`, to the coordinator; collective."""
        # Every run calls `join_info`, but only an elastic one needs these modules.
        from hpcsgd.elastic import coordinator_address
        from hpcsgd.elastic.addresses import own_towards
        from hpcsgd.elastic.elastic_average import ElasticAverage

        host = own_towards(coordinator_address.awaited(self.coordinator, self.timeout))
        return ElasticAverage(
            self.replica_group, group, self.coordinator, self.token, host,
            replica_groups=self.replica_groups, heartbeat_timeout=self.heartbeat_timeout,
            timeout=self.timeout,
        )  # fmt: skip


def join_info(environ: Mapping[str, str] = os.environ) -> JoinInfo | None:
    """Return what the launcher wrote into `environ`, or None if this process is in no elastic group."""
    text = environ.get(VARIABLE)
    return None if text is None else JoinInfo(**json.loads(text))
