"""A local cluster keeps strangers on the same machine out."""

import pytest

from stratagem import ClusterCoordinator, LocalCluster, ParameterServerStrategy, errors
from stratagem._wire.connecting import connect
from stratagem._wire.handshake import ClusterKey

pytestmark = pytest.mark.process


@pytest.mark.parametrize("in_process", [True, False])
def test_a_local_cluster_makes_its_own_key(monkeypatch, in_process):
    """Workers run what they are sent, and loopback is open to every user of the machine."""
    monkeypatch.delenv("STRATAGEM_CLUSTER_KEY", raising=False)
    monkeypatch.delenv("STRATAGEM_CLUSTER_KEY_FILE", raising=False)
    with LocalCluster(workers=1, ps=1, in_process=in_process) as cluster:
        spec = cluster.cluster_spec
        for job in ("worker", "ps"):
            for key in (None, ClusterKey.random()):
                with pytest.raises(errors.WireError):
                    connect(spec.task_address(job, 0), key=key, timeout_s=60).close()
        assert str(cluster.resolver.cluster_key_text()) not in repr(cluster.resolver)
        strategy = ParameterServerStrategy(cluster.resolver)
        with strategy, ClusterCoordinator(strategy) as coordinator:
            assert coordinator.schedule(lambda: 7).fetch(timeout_s=120) == 7
