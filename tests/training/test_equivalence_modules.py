"""Every module family of torch.nn trains under every strategy as in plain PyTorch (issue 2, section 3)."""

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import prune

import stratagem as sg

ROWS = 5  # uneven on two replicas and on three


def rows(*shape, dtype=torch.float32, batches=3, high=None):
    generator = torch.Generator().manual_seed(7)
    sizes = (ROWS, 4, 7)[:batches]
    if high is not None:
        return [torch.randint(0, high, (n, *shape), generator=generator) for n in sizes]
    return [torch.randn(n, *shape, generator=generator, dtype=dtype) for n in sizes]


class Apply(nn.Module):
    """Makes any module a model of one output: fn says how it is called."""

    def __init__(self, inner, fn):
        super().__init__()
        self.inner = inner
        self.fn = fn

    def forward(self, x):
        out = self.fn(self.inner, x)
        return torch.view_as_real(out) if out.is_complex() else out


def plain(module, x):
    return module(x)


def first(module, x):
    return module(x)[0]


def step(model, optimizer, x):
    """Mean over rows of something that is not linear in the output."""
    optimizer.zero_grad()
    out = model(x)
    loss = (out.flatten(1) - 0.3).square().mean(dim=1).mean()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


class Tied(nn.Module):
    """Output weights are the embedding's, tied by assignment after creation."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.out = nn.Linear(6, 11, bias=False)
        self.out.weight = self.embed.weight

    def forward(self, x):
        return self.out(self.embed(x).mean(1))


class Lists(nn.Module):
    """ParameterList, ParameterDict, ModuleList, ModuleDict, a bare parameter, plain tensors."""

    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([nn.Parameter(torch.randn(4, 4) * 0.3) for _ in range(2)])
        self.dict = nn.ParameterDict({"a": nn.Parameter(torch.randn(4)), "b": torch.randn(4)})
        self.modules_ = nn.ModuleList([nn.Linear(4, 4), nn.Tanh()])
        self.named = nn.ModuleDict({"last": nn.Linear(4, 2)})
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.shift = torch.tensor([0.1, 0.2, 0.3, 0.4])  # neither parameter nor buffer
        self.nested = {"more": torch.ones(4)}

    def forward(self, x):
        for weight in self.list:
            x = torch.tanh(x @ weight)
        x = x * self.dict["a"] + self.dict["b"] + self.shift * self.nested["more"]
        for each in self.modules_:
            x = each(x)
        return self.named["last"](x) * self.scale


class Late(nn.Module):
    """Registers a parameter and a buffer at the first call (RUN-9)."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x):
        x = torch.relu(self.first(x))
        if "late" not in self._parameters:
            self.late = nn.Parameter(torch.full((4,), 0.5))
            self.register_buffer("offset", torch.full((4,), 0.25))
        return x * self.late + self.offset


def encoder(module, x):
    return module(x)


def attention(module, x):
    return module(x, x, x)[0]


def packed(module, x):
    lengths = torch.arange(1, x.shape[0] + 1).clamp(max=x.shape[1]).flip(0)
    order = torch.nn.utils.rnn.pack_padded_sequence(
        x, lengths, batch_first=True, enforce_sorted=True
    )
    return torch.nn.utils.rnn.pad_packed_sequence(module(order)[0], batch_first=True)[0][:, :1]


MODULES = {
    "linear": (lambda: nn.Linear(4, 3), plain, rows(4)),
    "bilinear": (lambda: nn.Bilinear(4, 4, 3), lambda m, x: m(x, x), rows(4)),
    "mlp": (lambda: nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)), plain, rows(4)),
    "prelu": (lambda: nn.Sequential(nn.Linear(4, 4), nn.PReLU(4)), plain, rows(4)),
    "conv1d": (lambda: nn.Conv1d(2, 3, 3), plain, rows(2, 8)),
    "conv2d": (lambda: nn.Conv2d(2, 3, 3, groups=1), plain, rows(2, 6, 6)),
    "conv3d": (lambda: nn.Conv3d(1, 2, 2), plain, rows(1, 4, 4, 4)),
    "deconv1d": (lambda: nn.ConvTranspose1d(2, 3, 3), plain, rows(2, 8)),
    "deconv2d": (lambda: nn.ConvTranspose2d(2, 3, 3), plain, rows(2, 5, 5)),
    "deconv3d": (lambda: nn.ConvTranspose3d(1, 2, 2), plain, rows(1, 3, 3, 3)),
    "embedding": (lambda: nn.Embedding(9, 4, padding_idx=0), plain, rows(3, high=9)),
    "bag sum": (lambda: nn.EmbeddingBag(9, 4, mode="sum"), plain, rows(3, high=9)),
    "bag mean": (lambda: nn.EmbeddingBag(9, 4, mode="mean"), plain, rows(3, high=9)),
    "bag max": (lambda: nn.EmbeddingBag(9, 4, mode="max"), plain, rows(3, high=9)),
    "layernorm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6)), plain, rows(4)),
    "rmsnorm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.RMSNorm(6)), plain, rows(4)),
    "groupnorm": (lambda: nn.Sequential(nn.Linear(4, 6), nn.GroupNorm(2, 6)), plain, rows(4)),
    "instancenorm": (
        lambda: nn.Sequential(nn.Conv1d(2, 3, 3), nn.InstanceNorm1d(3, affine=True)),
        plain,
        rows(2, 8),
    ),
    "batchnorm eval": (
        lambda: nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6).eval()),
        plain,
        rows(4),
    ),
    "rnn": (lambda: nn.RNN(4, 5, batch_first=True), first, rows(3, 4)),
    "rnn relu": (lambda: nn.RNN(4, 5, nonlinearity="relu", batch_first=True), first, rows(3, 4)),
    "lstm": (
        lambda: nn.LSTM(4, 5, num_layers=2, bidirectional=True, batch_first=True), first, rows(3, 4)
    ),
    "lstm proj": (lambda: nn.LSTM(4, 5, proj_size=2, batch_first=True), first, rows(3, 4)),
    "gru": (lambda: nn.GRU(4, 5, batch_first=True), first, rows(3, 4)),
    "rnn cell": (lambda: nn.RNNCell(4, 5), plain, rows(4)),
    "lstm cell": (lambda: nn.LSTMCell(4, 5), first, rows(4)),
    "gru cell": (lambda: nn.GRUCell(4, 5), plain, rows(4)),
    "attention": (lambda: nn.MultiheadAttention(4, 2, batch_first=True), attention, rows(3, 4)),
    "attention kv": (
        lambda: nn.MultiheadAttention(4, 2, batch_first=True, kdim=4, vdim=4, add_bias_kv=True),
        attention,
        rows(3, 4),
    ),
    "transformer encoder": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True), 2
        ),
        encoder,
        rows(3, 4),
    ),
    "transformer": (
        lambda: nn.Transformer(4, 2, 1, 1, 8, dropout=0.0, batch_first=True),
        lambda m, x: m(x, x),
        rows(3, 4),
    ),
    "lazy linear": (lambda: nn.Sequential(nn.LazyLinear(5), nn.ReLU(), nn.LazyLinear(2)), plain, rows(4)),
    "lazy conv": (lambda: nn.LazyConv1d(3, 2), plain, rows(2, 6)),
    "weight norm": (lambda: nn.utils.parametrizations.weight_norm(nn.Linear(4, 3)), plain, rows(4)),
    "spectral norm": (
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)), plain, rows(4)
    ),
    "orthogonal": (lambda: nn.utils.parametrizations.orthogonal(nn.Linear(4, 4)), plain, rows(4)),
    "old spectral norm": (lambda: nn.utils.spectral_norm(nn.Linear(4, 3)), plain, rows(4)),
    "pruned": (lambda: prune.l1_unstructured(nn.Linear(4, 3), "weight", 0.5), plain, rows(4)),
    "parameter containers": (Lists, plain, rows(4)),
    "tied": (Tied, plain, rows(3, high=11)),
    "complex": (lambda: nn.Linear(4, 3, dtype=torch.complex64), plain, rows(4, dtype=torch.complex64)),
    "double": (lambda: nn.Linear(4, 3, dtype=torch.float64), plain, rows(4, dtype=torch.float64)),
    "unfold": (
        lambda: nn.Sequential(nn.Conv2d(1, 2, 3), nn.PixelShuffle(1), nn.Flatten(), nn.Linear(32, 2)),
        plain,
        rows(1, 6, 6),
    ),
    "adaptive": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 3), nn.AdaptiveAvgPool1d(1), nn.Flatten(), nn.GELU()),
        plain,
        rows(2, 9),
    ),
}  # fmt: skip


# torch says so once, wherever an LSTM with projections runs on a CPU.
@pytest.mark.filterwarnings("ignore:LSTM with projections is not supported with oneDNN")
@pytest.mark.parametrize("name", MODULES)
def test_module_trains_the_same(name, usual):
    make, call, batches = MODULES[name]
    sg.testing.assert_equivalent(lambda: Apply(make(), call), sgd, step, batches, usual)


def test_old_weight_norm_trains_the_same(strategy):
    """Old style: a forward hook puts the computed weight on the module, each replica its own."""

    def make():
        with pytest.warns(FutureWarning):
            return nn.utils.weight_norm(nn.Linear(4, 3))

    sg.testing.assert_equivalent(lambda: Apply(make(), plain), sgd, step, rows(4), strategy)


def test_packed_sequences_train_the_same(two):
    sg.testing.assert_equivalent(
        lambda: Apply(nn.LSTM(4, 5, batch_first=True), packed), sgd, step, rows(3, 4), two
    )


def test_adaptive_softmax_trains_the_same(strategy):
    """Its loss is a mean over rows, its head and tails are used by some rows only."""

    def loss_step(model, optimizer, batch):
        x, y = batch
        optimizer.zero_grad()
        model(x, y).loss.backward()
        optimizer.step()

    batches = [
        (torch.randn(n, 6, generator=torch.Generator().manual_seed(n)), torch.arange(n) * 3 % 20)
        for n in (5, 1, 7)
    ]
    sg.testing.assert_equivalent(
        lambda: nn.AdaptiveLogSoftmaxWithLoss(6, 20, [4, 10], div_value=2.0),
        sgd,
        loss_step,
        batches,
        strategy,
    )


@pytest.mark.parametrize("kind", ["embedding", "bag"])
@pytest.mark.parametrize("optimizer", ["SGD", "SparseAdam", "Adagrad"])
def test_sparse_gradients_train_the_same(kind, optimizer, usual):
    """Embeddings with sparse=True: gradients stay sparse all the way to the optimizer."""
    layouts = []

    def make():
        if kind == "bag":
            return Apply(nn.EmbeddingBag(9, 4, sparse=True, mode="sum"), plain)
        return Apply(nn.Embedding(9, 4, sparse=True), plain)

    def sparse_step(model, opt, x):
        opt.zero_grad()
        (model(x).flatten(1) - 0.3).square().mean().backward()
        layouts.append(model.inner.weight.grad.layout)
        opt.step()

    sg.testing.assert_equivalent(
        make,
        lambda model: getattr(torch.optim, optimizer)(model.parameters(), lr=0.05),
        sparse_step,
        rows(3, high=9),
        usual,
    )
    assert set(layouts) == {torch.sparse_coo}


def test_sync_modules_that_register_late_are_shared(several):
    """RUN-9: a parameter made inside run is made once, and every replica trains that one."""
    with several.scope():
        model = Late()
    reference = Late()
    reference.load_state_dict(model.state_dict(), strict=False)
    x = torch.randn(6, 4)

    def train(batch):
        model.zero_grad()
        loss = F.mse_loss(model(batch), torch.ones_like(batch))
        loss.backward()
        return model.late.grad.clone(), loss.detach()

    parts = sg.PerReplica(list(torch.tensor_split(x, several.num_replicas_in_sync)))
    for _ in range(2):
        grads, _ = several.run(train, args=(parts,))
    F.mse_loss(reference(x), torch.ones_like(x)).backward()
    for grad in several.local_results(grads):
        torch.testing.assert_close(grad, reference.late.grad)
    assert list(model.state_dict()) == list(reference.state_dict())
    assert sum(p is model.late for p in model.parameters()) == 1


@pytest.mark.parametrize(("aggregation", "rows"), [("mean", 6), ("sum", 6), ("sum", 5)])
def test_losses_that_couple_rows_agree_as_documented(aggregation, rows, make_strategy):
    """Rows gathered, the loss of all of them in every replica (docs/same-numbers.md)."""
    torch.manual_seed(0)
    data = torch.randn(rows, 4)

    def coupled(encoded, temperature):
        logits = encoded @ encoded.T * temperature
        return F.cross_entropy(logits, torch.arange(len(encoded)))

    class Encoder(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.temperature = nn.Parameter(torch.tensor(0.7))

    for kind in ("central2", "mirrored2", "central3"):
        strategy = make_strategy(kind, gradient_aggregation=aggregation)
        with strategy.scope():
            model = Encoder()
        plain = Encoder()
        plain.load_state_dict(model.state_dict())

        def step(x, model=model):
            context = sg.get_replica_context()
            loss = coupled(context.all_gather(model(x), axis=0), model.temperature)
            (loss / context.num_replicas_in_sync if aggregation == "sum" else loss).backward()

        size = strategy.num_replicas_in_sync
        strategy.run(step, args=(sg.PerReplica(list(torch.tensor_split(data, size))),))
        coupled(plain(data), plain.temperature).backward()
        for a, b in zip(model.parameters(), plain.parameters(), strict=True):
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("aggregation", ["mean", "sum"])
@pytest.mark.parametrize("kind", ["central2", "central3", "mirrored2", "one"])
def test_sync_batch_norm_is_batch_norm_over_the_whole_batch(kind, aggregation, make_strategy):
    """Weights and running statistics of one device; replicas with one row and with none as well."""
    strategy = make_strategy(kind, gradient_aggregation=aggregation)

    def build():
        torch.manual_seed(3)
        normed = nn.Sequential(
            nn.Conv1d(2, 4, 1), nn.BatchNorm1d(4), nn.ReLU(), nn.Flatten(), nn.Linear(12, 4),
            nn.BatchNorm1d(4, momentum=None), nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False),
            nn.Linear(3, 2),
        )  # fmt: skip
        return nn.SyncBatchNorm.convert_sync_batchnorm(normed).double()

    with strategy.scope():
        model = build()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    plain = build()
    plain_optimizer = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    size = strategy.num_replicas_in_sync

    def train(model, optimizer, x, y):
        optimizer.zero_grad()
        F.mse_loss(model(x), y, reduction=aggregation).backward()
        optimizer.step()

    for rows in (5, 2, 7, 4):
        x, y = torch.randn(rows, 2, 3).double(), torch.randn(rows, 2).double()
        args = (x, y)
        if size > 1:
            args = tuple(sg.PerReplica(list(torch.tensor_split(each, size))) for each in (x, y))
        strategy.run(lambda x, y: train(model, optimizer, x, y), args=args)
        train(plain, plain_optimizer, x, y)
    for (name, a), b in zip(model.state_dict().items(), plain.state_dict().values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9, msg=lambda m, n=name: f"{n}: {m}")
    model.eval()
    plain.eval()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-9, atol=1e-9)
    assert type(model[1]).__name__ == "SyncBatchNorm"


@pytest.mark.parametrize(("aggregation", "rows"), [("mean", 6), ("sum", 6), ("sum", 5)])
@pytest.mark.parametrize("kind", ["central2", "mirrored2"])
def test_second_derivatives_through_sync_batch_norm(kind, aggregation, rows, make_strategy):
    """The gradient penalty of a critic with batch normalisation (DRAGAN) depends on all rows twice."""
    strategy = make_strategy(kind, gradient_aggregation=aggregation)

    def build():
        torch.manual_seed(3)
        layers = nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1)
        return nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(*layers)).double()

    def step(model, x):
        x = x.clone().requires_grad_(True)
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).square()
        (penalty.sum() if aggregation == "sum" else penalty.mean()).backward()

    with strategy.scope():
        model = build()
    plain = build()
    x = torch.randn(rows, 3).double()
    strategy.run(lambda x: step(model, x), args=(sg.PerReplica([x[:3], x[3:]]),))
    step(plain, x)
    for (name, a), b in zip(model.named_parameters(), plain.parameters(), strict=True):
        if name != "3.bias":  # the slope does not depend on it
            torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)


class NormAndActivation(nn.SyncBatchNorm):
    """A subclass that does more than to normalise (timm's SyncBatchNormAct)."""

    def forward(self, input):
        return torch.tanh(super().forward(input))


@pytest.mark.parametrize("kind", ["central2", "mirrored2"])
def test_subclasses_of_sync_batch_norm_keep_their_own_forward(kind, make_strategy):
    """The activation of such a class was left out in replicas, without an error (issue 20)."""
    strategy = make_strategy(kind)
    x = torch.randn(6, 3, dtype=torch.float64)

    def build():
        torch.manual_seed(3)
        return nn.Sequential(nn.Linear(3, 4), NormAndActivation(4), nn.Linear(4, 1)).double()

    with strategy.scope():
        model = build()
    plain = build()
    strategy.run(
        lambda x: model(x).square().mean().backward(), args=(sg.PerReplica([x[:3], x[3:]]),)
    )
    plain(x).square().mean().backward()
    for a, b in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(a.grad, b.grad, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-9, atol=1e-9)
    assert type(model[1]).__name__ == "NormAndActivation"
    assert isinstance(model[1], NormAndActivation)


def test_sync_batch_norm_of_one_value_in_all_raises_as_on_one_device(make_strategy):
    strategy = make_strategy("central2")
    with strategy.scope():
        model = nn.SyncBatchNorm(3)
    x = torch.randn(1, 3)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        strategy.run(model, args=(sg.PerReplica([x, x[:0]]),))


@pytest.mark.parametrize("kind", ["central2", "central3", "mirrored2"])
def test_buffers_a_module_gets_outside_the_scope_are_written_once_per_step(kind, make_strategy):
    """Layers converted and buffers registered on a model of the scope after it was left."""

    class Counting(nn.Linear):
        def forward(self, x):
            self.calls += 1
            return super().forward(x)

    def build():
        torch.manual_seed(3)
        return nn.Sequential(Counting(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 2)).double()

    strategy = make_strategy(kind)
    with strategy.scope():
        model = build()
    plain = build()
    for each in (model, plain):
        nn.SyncBatchNorm.convert_sync_batchnorm(each)
        each[0].register_buffer("calls", torch.tensor(0))
    size = strategy.num_replicas_in_sync
    for _ in range(3):
        x = torch.randn(5, 4).double()
        strategy.run(model, args=(sg.PerReplica(list(torch.tensor_split(x, size))),))
        plain(x)
    for a, b in zip(model.buffers(), plain.buffers(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
