"""One training step on the device: loss, backward, update. Never waits for the device.

Each row length has static input buffers and, on CUDA, its own captured graph of the whole step.
`prepare` decides once whether graphs are used, and reports it. Results are summed on the device and
read rarely.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from penstock.errors import CapacityError
from training.config import TrainConfig
from training.data import Batch
from training.model import Qwen35Moe
from training.optimizer import FlatAdamW

MAX_STEPS_AHEAD = (
    4  # steps that the host may queue: with more, the schedule's clock would run ahead
)
COLUMNS = ("loss", "tokens", "draft_loss", "draft_hits", "draft_tokens", "exact_rows", "rows")


@dataclass(frozen=True, slots=True)
class BatchInputs:
    token_ids: Tensor  # [R, T] int32, padded on the right
    first_targets: Tensor  # [R] position of the first token to learn
    lengths: Tensor  # [R]
    kinds: Tensor  # [R] int64, index into the totals

    @classmethod
    def random(cls, rows: int, row_len: int, vocab_size: int, device: torch.device) -> BatchInputs:
        """Full rows of random tokens, for warm-up, where only shapes matter."""
        return cls(
            torch.randint(vocab_size, (rows, row_len), dtype=torch.int32, device=device),
            torch.full((rows,), row_len // 2, device=device),
            torch.full((rows,), row_len, device=device),
            torch.zeros(rows, dtype=torch.int64, device=device),
        )

    def copy_from(self, batch: Batch) -> None:
        """Queues the copy; the pinned source is freed only after the copy."""
        for target, array in (
            (self.token_ids, batch.token_ids),
            (self.first_targets, batch.first_targets),
            (self.lengths, batch.lengths),
            (self.kinds, batch.kinds),
        ):
            source = torch.from_numpy(array).to(target.dtype)
            if target.is_cuda:
                source = source.pin_memory()
            target.copy_(source, non_blocking=True)


def compute_loss(
    model: Qwen35Moe, inputs: BatchInputs, config: TrainConfig, num_kinds: int
) -> tuple[Tensor, Tensor]:
    """The training loss, and its parts by kind, [kinds, COLUMNS]."""
    token_ids = inputs.token_ids.long()
    place = torch.arange(token_ids.shape[1], device=token_ids.device)
    counted = (place < inputs.lengths[:, None]).float()
    hidden, imbalance = model(token_ids, counted)
    drafted, draft_imbalance = model.draft(hidden, token_ids, counted)

    def score(states: Tensor, distance: int) -> tuple[Tensor, Tensor, Tensor]:
        """Losses [R, T], wrong predictions and number of targets per row, for targets `distance`
        ahead.
        """
        reached = place + distance
        wanted = (reached >= inputs.first_targets[:, None]) & (reached < inputs.lengths[:, None])
        logits = model.logits(states)
        targets = token_ids.roll(-distance, 1)
        losses = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten(), reduction="none")
        losses = losses.view_as(targets) * wanted
        wrong = (logits.detach().argmax(-1) != targets) & wanted
        return losses, wrong.sum(1), wanted.sum(1)

    losses, wrong, num_targets = score(hidden, 1)
    draft_losses, draft_wrong, num_drafts = score(drafted, 2)
    balance = (imbalance + draft_imbalance) / len(model.decoder_layers)
    is_first = place + 1 == inputs.first_targets[:, None]
    stress = 1.0 + (config.first_token_weight - 1.0) * is_first
    total_stress = num_targets.sum() + (config.first_token_weight - 1.0) * len(token_ids)
    mean = (losses * stress).sum() / total_stress.clamp(min=1)
    draft_mean = draft_losses.sum() / num_drafts.sum().clamp(min=1)
    # A batch of long rows has few targets. Weighted by the square root of their number it adds as
    # much noise as other batches; weighted by the number, long rows would hardly be learned.
    weight = (num_targets.sum() / config.targets_per_full_step).clamp(max=1.0).sqrt()
    loss = weight * (mean + config.mtp_weight * draft_mean) + config.balance_weight * balance
    # If every token of a row is the most likely one, greedy decoding reproduces the row.
    columns = (
        losses.sum(1),
        num_targets,
        draft_losses.sum(1),
        num_drafts - draft_wrong,
        num_drafts,
        wrong == 0,
        wrong >= 0,
    )
    by_row = torch.stack([column.detach().float() for column in columns], 1)
    totals = by_row.new_zeros(num_kinds, len(COLUMNS)).index_add_(0, inputs.kinds, by_row)
    return loss, totals


class Trainer:
    """Owns the device state of a step: model, optimizer, input buffers, graphs and totals."""

    def __init__(
        self,
        model: Qwen35Moe,
        optimizer: FlatAdamW,
        config: TrainConfig,
        num_kinds: int,
        device: torch.device,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.config = config
        self.device = device
        self.totals = torch.zeros(num_kinds, len(COLUMNS), device=device)
        self.num_skipped = torch.zeros((), device=device)
        self.inputs = {
            row_len: BatchInputs.random(
                config.rows_of(row_len), row_len, model.config.vocab_size, device
            )
            for row_len in config.row_lens
        }
        self._graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self._queued: deque[torch.cuda.Event] = deque()

    def prepare(self, report: Callable[[str], None], use_graphs: bool, use_compile: bool) -> None:
        """Warms up every shape in the fastest mode that works; weights and totals are kept."""
        if self.device.type != "cuda":
            report("steps run eagerly: no CUDA device")
            return
        before = {name: tensor.clone() for name, tensor in self.optimizer.state().items()}
        ways = list(dict.fromkeys([(use_graphs, use_compile), (use_graphs, False), (False, False)]))
        for number, (with_graphs, with_compile) in enumerate(ways):
            try:
                self._prepare_one_way(report, with_graphs, with_compile)
                break
            except torch.OutOfMemoryError as error:
                raise CapacityError(
                    f"a batch of {self.config.tokens_per_batch:,} tokens does not fit the device",
                    f"{error}.",
                    "Give a smaller --tokens-per-batch.",
                ) from error
            except RuntimeError as error:
                if number == len(ways) - 1:
                    raise
                self._graphs.clear()
                torch.compiler.set_stance("force_eager")  # compiled code is no longer used
                report(
                    f"!!! FALLING BACK: graphs={with_graphs} compile={with_compile} failed with: "
                    f"{error}"
                )
            finally:
                self.optimizer.restore(before)
                self._clear_totals()
        report(f"steps run with graphs={with_graphs} compile={with_compile}")

    def _prepare_one_way(
        self, report: Callable[[str], None], with_graphs: bool, with_compile: bool
    ) -> None:
        if with_compile:
            # Compiles per layer: layers of one kind share code, the whole model would take minutes.
            torch._dynamo.config.recompile_limit = 8 * len(self.inputs)
            for layer in self.model.decoder_layers:
                layer.compile(dynamic=False)
        self.optimizer.lr.zero_()
        # Longest rows first, because they need the most memory: a failure shows at once, and the
        # pool is large enough for the rest.
        for row_len in sorted(self.inputs, reverse=True):
            eager = self._warm_up(row_len)
            if with_graphs:
                self._capture(row_len, eager)
            report(
                f"row length {row_len} ready, {torch.cuda.max_memory_reserved() / 2**30:.1f} GiB "
                "reserved"
            )

    def step(self, batch: Batch, lr: float) -> None:
        inputs = self.inputs[batch.row_len]
        inputs.copy_from(batch)
        self.optimizer.lr.fill_(lr)
        if graph := self._graphs.get(batch.row_len):
            graph.replay()
        else:
            self._run(inputs)
        if self.device.type == "cuda":
            self._wait_for_earlier_steps()

    def read_totals(self) -> tuple[list[list[float]], int]:
        """Sums since the last call, by kind in COLUMNS, and the number of skipped steps. Waits for
        the device.
        """
        totals, num_skipped = self.totals.tolist(), int(self.num_skipped.item())
        self._clear_totals()
        return totals, num_skipped

    def _run(self, inputs: BatchInputs) -> None:
        self.optimizer.gradients.zero_()
        loss, totals = compute_loss(self.model, inputs, self.config, len(self.totals))
        loss.backward()
        taken = self.optimizer.update()
        # A skipped step counts nothing: its sums may be NaN.
        self.totals.add_(totals.masked_fill(taken == 0, 0.0))
        self.num_skipped.add_(1 - taken)

    def _warm_up(self, row_len: int) -> Tensor:
        """Runs the shape eagerly and returns its counts."""
        # On a side stream, as capture requires: libraries allocate workspaces on first use.
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):
                self._clear_totals()
                self._run(self.inputs[row_len])
        torch.cuda.current_stream().wait_stream(stream)
        totals = self.totals.clone()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()  # the graph's pool needs the same memory next
        return totals

    def _capture(self, row_len: int, eager: Tensor) -> None:
        pool = next(iter(self._graphs.values())).pool() if self._graphs else None
        graph = torch.cuda.CUDAGraph()
        # All graphs share one pool: they never overlap, and their results are outside of it.
        with torch.cuda.graph(graph, pool=pool):
            self._run(self.inputs[row_len])
        self._clear_totals()
        graph.replay()
        torch.cuda.synchronize()
        # The learning rate is zero here, so both runs used the same weights.
        if not torch.allclose(eager[:, :3], self.totals[:, :3], rtol=1e-2):
            raise RuntimeError(
                f"row length {row_len}: a replay counts {self.totals.tolist()}, eager "
                f"{eager.tolist()}"
            )
        self._graphs[row_len] = graph

    def _clear_totals(self) -> None:
        self.totals.zero_()
        self.num_skipped.zero_()

    def _wait_for_earlier_steps(self) -> None:
        event = torch.cuda.Event()
        event.record()
        self._queued.append(event)
        if len(self._queued) > MAX_STEPS_AHEAD:
            self._queued.popleft().synchronize()
