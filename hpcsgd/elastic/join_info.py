"""What a launcher passes to its replica group, in one environment variable."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from hpcsgd.comm import Communicator
from hpcsgd.elastic import coordinator_address
from hpcsgd.elastic.addresses import own_towards
from hpcsgd.elastic.elastic_average import ElasticAverage

VARIABLE = "HPCSGD_REPLICA_GROUP"


@dataclass(frozen=True)
class JoinInfo:
    """How one of `replica_groups` replica groups joins the others."""

    replica_group: int
    replica_groups: int
    coordinator: str
    """host:port, or the folder of all terms, which has that; see `coordinator_address`."""
    token: str
    heartbeat_timeout: float
    timeout: float

    def to_environment(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}

    def accept(self, group: Communicator) -> ElasticAverage:
        """Connect this replica group, whose ranks are `group`, to the coordinator; collective."""
        host = own_towards(coordinator_address.awaited(self.coordinator, self.timeout))
        return ElasticAverage(
            self.replica_group, group, self.coordinator, self.token, host,
            replica_groups=self.replica_groups, heartbeat_timeout=self.heartbeat_timeout,
            timeout=self.timeout,
        )  # fmt: skip


def join_info(environ: Mapping[str, str] = os.environ) -> JoinInfo | None:
    """Return the information that this process was started with, or None."""
    text = environ.get(VARIABLE)
    return None if text is None else JoinInfo(**json.loads(text))
