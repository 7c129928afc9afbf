"""Where the cluster key comes from, and who may read it."""

import pickle
import stat
import subprocess
import sys

import pytest
from warm_start import Program

from stratagem import (
    ClusterCoordinator,
    ClusterSpec,
    LocalCluster,
    ParameterServerStrategy,
    Server,
    config,
)
from stratagem._wire.cluster_key import cluster_key, user_key_path, user_key_text
from stratagem._wire.handshake import ClusterKey
from stratagem._wire.listener import Listener
from stratagem.cluster_resolver import ClusterResolver, SimpleClusterResolver

SECRET = "a secret of the cluster, 32 bytes"

_PRINT_KEY = "from stratagem._wire.cluster_key import user_key_text; print(user_key_text())"


@pytest.fixture(autouse=True)
def _home(monkeypatch, tmp_path):
    """Give each test a user without a key file."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv("STRATAGEM_CLUSTER_KEY", raising=False)
    monkeypatch.delenv("STRATAGEM_CLUSTER_KEY_FILE", raising=False)


def test_the_key_file_is_created_once_and_only_its_user_can_read_it():
    """The second call returns the same key; the file has mode 0600, its directory 0700."""
    first = user_key_text()
    assert user_key_text() == first
    assert len(first) == 64
    path = user_key_path()
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert list(path.parent.iterdir()) == [path]


@pytest.mark.process
def test_processes_that_start_together_get_the_same_key():
    """Creating the file is atomic."""
    command = [sys.executable, "-c", _PRINT_KEY]
    started = [Program(command, stdout=subprocess.PIPE, text=True) for _ in range(4)]
    keys = {process.communicate(timeout=120)[0].strip() for process in started}
    assert keys == {user_key_text()}


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o620, 0o604])
def test_a_key_file_that_others_can_read_is_refused(monkeypatch, tmp_path, mode):
    """Others may have read the key: tasks must not start with it."""
    path = tmp_path / "cluster.key"
    path.write_text(SECRET)
    path.chmod(mode)
    monkeypatch.setenv("STRATAGEM_CLUSTER_KEY_FILE", str(path))
    with pytest.raises(PermissionError, match=f"{mode:04o}.*chmod 600"):
        cluster_key()
    with pytest.raises(PermissionError):
        Server({"ps": ["127.0.0.1:0"]})


def test_the_users_own_key_file_is_checked_too():
    """A user who makes the file readable by mistake is told so."""
    user_key_text()
    user_key_path().chmod(0o604)
    with pytest.raises(PermissionError, match="0604"):
        user_key_text()


def test_a_directory_that_cannot_be_written_is_named(monkeypatch, tmp_path):
    """The error says which file, and what to set instead."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    with pytest.raises(PermissionError, match=r"cluster\.key.*STRATAGEM_CLUSTER_KEY"):
        cluster_key()


def test_the_environment_comes_before_the_key_file(monkeypatch):
    """And a key that is passed comes first."""
    monkeypatch.setenv("STRATAGEM_CLUSTER_KEY", SECRET)
    assert cluster_key().text() == SECRET
    assert cluster_key(SECRET + "!").text() == SECRET + "!"
    assert not user_key_path().exists()


def test_nothing_that_unpickles_listens_without_a_key():
    """Loopback ports are open to every user of the machine."""
    with pytest.raises(PermissionError, match="run code"):
        Listener("127.0.0.1:0", may_unpickle=True)


@pytest.mark.parametrize("job", ["ps", "worker"])
def test_a_server_without_a_key_uses_the_users_key(job):
    """Another user cannot connect; the same user can, with no setting at all."""
    from stratagem._wire.connecting import connect
    from stratagem.errors import AuthenticationError

    with Server({job: ["127.0.0.1:0"]}) as server:
        for key in (None, ClusterKey.random()):
            with pytest.raises(AuthenticationError):
                connect(server.address, key=key, timeout_s=120)
        connect(server.address, key=cluster_key(), timeout_s=120).close()


def test_resolvers_are_pickled_without_their_key():
    """A function that captures a resolver is sent to workers; the key is not."""
    spec = ClusterSpec({"worker": ["localhost:2222"], "ps": ["localhost:2223"]})
    resolver = SimpleClusterResolver(spec, cluster_key=SECRET)
    data = pickle.dumps(resolver)
    assert SECRET.encode() not in data
    copy = pickle.loads(data)
    assert copy.cluster_spec() == spec
    assert copy.cluster_key_text() is None
    with LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        secret = cluster.resolver.cluster_key_text()
        data = pickle.dumps(cluster.resolver)
        assert secret is not None
        assert secret.encode() not in data
        assert pickle.loads(data).cluster_spec() == cluster.cluster_spec
    with pytest.raises(TypeError, match="never sent"):
        pickle.dumps(ClusterKey.random())


def test_a_directory_of_the_users_choice(monkeypatch, tmp_path):
    """Without XDG_CONFIG_HOME the file is below the home directory."""
    monkeypatch.delenv("XDG_CONFIG_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert config.user_directory() == tmp_path / ".config" / "stratagem"


class OwnResolver(ClusterResolver):
    """A user's resolver, which keeps the key in an attribute of its own."""

    def __init__(self, spec: ClusterSpec, secret: str) -> None:
        super().__init__()
        self.spec, self.secret = spec, secret

    def cluster_spec(self) -> ClusterSpec:
        return self.spec

    def cluster_key_text(self) -> str:
        return self.secret


def test_the_key_is_refused_in_everything_that_is_sent():
    """Captured, passed, or copied from the environment, also within a large pickle."""
    with LocalCluster(workers=1, ps=1, in_process=True) as cluster:
        secret = cluster.resolver.cluster_key_text()
        assert secret is not None
        resolver = OwnResolver(cluster.cluster_spec, secret)
        strategy = ParameterServerStrategy(resolver)
        with strategy, ClusterCoordinator(strategy) as coordinator:
            with pytest.raises(ValueError, match="contains the cluster key"):
                coordinator.schedule(lambda: resolver)
            for value in (resolver, {"KEY": secret}, [str(n) for n in range(10**6)] + [secret]):
                with pytest.raises(ValueError, match="contains the cluster key"):
                    coordinator.schedule(id, args=(value,))
            simple = SimpleClusterResolver(cluster.cluster_spec, cluster_key=secret)
            found = coordinator.schedule(lambda: simple.cluster_spec().num_tasks("worker"))
            assert found.fetch(timeout_s=60) == 1
