"""The page for users of tf.distribute maps every name and lists every limitation."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from stratagem.compat import spelling

PAGE = (Path(__file__).parents[2] / "docs" / "coming-from-tf-distribute.md").read_text()

# Every method and attribute with a heading on seed pages 000 to 004.
METHODS = """
    cluster_resolver extended num_replicas_in_sync distribute_datasets_from_function
    experimental_distribute_dataset experimental_distribute_values_from_function
    experimental_local_results gather reduce run scope experimental_assign_to_logical_device
    experimental_distribute_datasets_from_function experimental_make_numpy_dataset
    experimental_replicate_to_logical_devices experimental_split_to_logical_devices __deepcopy__
    experimental_run_v2 experimental_run make_dataset_iterator make_input_fn_iterator
    update_config_proto
""".split()

# Every other name of TensorFlow that the pages use.
NAMES = """
    DistributedValues MirroredStrategy ClusterResolver DistributedDataset ParameterServerStrategy
    InputContext CentralStorageStrategy TPUStrategy MultiWorkerMirroredStrategy get_replica_context
    StrategyExtended ClusterCoordinator ReduceOp.SUM ReduceOp.MEAN InputOptions RunOptions tf.nest
    tf.variable_creator_scope tf.saved_model.save tf.keras.Model get_strategy TPUClusterResolver
    TFConfigClusterResolver ValueContext Server OneDeviceStrategy element_spec tf.device from_tensors
    tf.config.experimental_connect_to_cluster reduce_to batch_reduce_to all_reduce all_gather
    ReplicaContext DistributeOptions AutoShardPolicy tf.data.TextLineDataset tf.data.TFRecordDataset
    tf.Module tf.IndexedSlices tf.train.CheckpointManager tf.train.Checkpoint
    tf.nn.embedding_lookup tf.enable_eager_execution FixedShardsPartitioner MinSizePartitioner
    InputReplicationMode InputIterator from_tensor_slices tf.convert_to_tensor tf.GradientTape
    tf.ConfigProto tf.Variable tf.function tf.data.Dataset GRPC_FAIL_FAST
    create_per_worker_dataset schedule join experimental_set_strategy
""".split()


def in_a_table(name: str) -> bool:
    pattern = rf"(?<![\w]){re.escape(name)}(?![\w])"
    return any(line.startswith("|") and re.search(pattern, line) for line in PAGE.splitlines())


@pytest.mark.parametrize("name", [*METHODS, *NAMES, *spelling.RENAMED, *spelling.KEPT])
def test_every_name_on_the_seed_pages_is_mapped(name: str) -> None:
    """A reader who searches for a name finds its row."""
    assert in_a_table(name), f"{name} is in no table of the page"


# The beginning of each limitation's row, LIM-1 … LIM-26 of the specification in order.
LIMITATIONS = """
    parameter-server training is experimental
    no GPUs with parameter servers
    custom training loops only
    needs a `ClusterCoordinator`
    the number of partitions must not change
    a SavedModel with partitioned variables
    a partitioned variable does not work with GradientTape
    only the first axis can be partitioned
    coordinator and servers must stay up
    do not rely on round-robin placement
    converting a partitioned variable to a tensor
    `GRPC_FAIL_FAST` must be set
    a distributed dataset cannot be transformed
    stateful transformations are ignored
    data order across workers is not guaranteed
    fewer files than workers
    `distribute_datasets_from_function` neither batches nor shards
    `gather` needs equal ranks
    `reduce` with `axis=None` fails
    `experimental_local_results` covers this process only
    `make_input_fn_iterator` takes PER_WORKER only
    V1 methods are deprecated
    logical devices are for TPUs only
    variables made outside the scope are not distributed
    `fn` may be called once or several times
    single-worker strategies have no cluster resolver
""".strip().splitlines()


@pytest.mark.parametrize("number", range(1, 27))
def test_every_limitation_has_a_row_in_the_table(number: int) -> None:
    """LIM-1 … LIM-26 each have a row with both columns filled."""
    wanted = f"| {LIMITATIONS[number - 1].strip()}"
    (row,) = [line for line in PAGE.splitlines() if line.startswith(wanted)]
    _, says, here, _ = row.split("|")
    assert says.strip()
    assert here.strip()
