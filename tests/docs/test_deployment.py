"""The deployment recipes: manifests fit the schema, and the ssh script starts and ends a cluster."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import kubernetes_validate
import pytest
import yaml
from waiting import wait_until

import stratagem as sg

RECIPES = Path(__file__).parents[2] / "docs" / "deployment"

# What `ssh` does, on this machine: run the command of the given host, and end it with the connection.
SSH = """#!/bin/bash
[ "$1" = -tt ] && shift
exec env -u STRATAGEM_CLUSTER_KEY bash -c "$2"
"""

TRAIN = """
import torch, stratagem as sg
with sg.auto_strategy() as strategy:
    with strategy.scope():
        total = sg.Variable(torch.zeros(()))
    print("steps", len(list(strategy.run_steps(lambda x: total.assign_add(x), [1.0] * 20))), float(total))
"""


def test_the_manifests_fit_the_schema() -> None:
    """Strictly: a misspelled field is an error. The addresses name the pods of the StatefulSets."""
    manifests = list(yaml.safe_load_all((RECIPES / "kubernetes.yaml").read_text()))
    version = kubernetes_validate.latest_version()
    for manifest in manifests:
        kubernetes_validate.validate(manifest, version, strict=True)
    named = {(one["kind"], one["metadata"]["name"]): one for one in manifests}
    cluster = yaml.safe_load(named["ConfigMap", "stratagem-cluster"]["data"]["CLUSTER"])
    for job in ("ps", "worker"):
        pods = named["StatefulSet", job]["spec"]["replicas"]
        assert cluster[job] == [f"{job}-{index}.stratagem:2222" for index in range(pods)]
    misspelled = {**named["StatefulSet", "ps"]}
    misspelled["spec"] = {**misspelled["spec"], "replicsa": 1}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(misspelled, version, strict=True)


@pytest.mark.slow
def test_the_ssh_script_trains_and_ends_its_tasks(tmp_path: Path) -> None:
    """With a program in the place of ssh that runs the commands here."""
    shim = tmp_path / "bin" / "ssh"
    shim.parent.mkdir()
    shim.write_text(SSH)
    shim.chmod(0o755)
    for name, options in (("stratagem", "-m stratagem"), ("python", "")):
        command = shim.with_name(name)
        command.write_text(f'#!/bin/bash\nexec "{sys.executable}" {options} "$@"\n')
        command.chmod(0o755)
    with (
        sg.Server({"ps": ["127.0.0.1:0"]}) as one,
        sg.Server({"ps": ["127.0.0.1:0"]}) as two,
    ):
        addresses = one.address, two.address  # free ports
    environment = {
        **os.environ,
        "PATH": f"{shim.parent}:{os.environ['PATH']}",
        "HOME": str(tmp_path),
        "PS": addresses[0],
        "WORKERS": addresses[1],
    }
    done = subprocess.run(
        [str(RECIPES / "with_ssh.sh"), sys.executable, "-c", TRAIN],
        env=environment,
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "steps 20 20.0" in done.stdout
    key = (tmp_path / ".stratagem.key").read_text().strip()
    assert len(key) == 64
    assert key not in done.stdout + done.stderr

    def ended() -> bool:
        lines = subprocess.run(
            ["ps", "-eo", "args"], capture_output=True, text=True, check=True
        ).stdout
        return not any(address in lines for address in addresses)

    wait_until(ended)
