# %% [markdown]
# # Add your own correction
#
# A correction is a file with a `Config` and a `Component`, and it can be named in any grid at once. Here is one in 25 lines, trained
# for a few seconds, in the table beside `none`, and held to the law that every correction has to keep.

# %%
import contextlib
import io
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from IPython.display import Markdown
from torch import nn

from treedraft import figures, report
from treedraft.cells import Workbench, collect
from treedraft.corrections._seam import Correction, State, select
from treedraft.data.regenerate import Settings, regenerate
from treedraft.grid import load_grid
from treedraft.ops.layers import rms_norm
from treedraft.results import write_rows
from treedraft.trees.best_first import BestFirst

scratch = tempfile.TemporaryDirectory()
os.environ["TREEDRAFT_RUNS"] = scratch.name  # what this notebook makes goes with it

# %% [markdown]
# ## The idea
#
# The Markov head adds a bias to the logits. Let us *nudge the hidden state* instead and let the target's own head make logits of it:
#
# $$h_i' = h_i + W_2\,\mathrm{silu}(W_1 [\bar h_i; \bar e(x_{i-1})])$$
#
# with the embedding $e$ of the token before, both parts normalised. $W_2$ starts at zero, so a new correction changes nothing.
#
# The seam asks for it twice: `forward` on whole blocks for training, and a `State` whose `step` scores nodes of a tree.


# %%
@dataclass(frozen=True, kw_only=True)
class Config:
    rank: int = 128


class NudgeState(State):
    def __init__(self, layer, hidden, borrowed):
        self.layer, self.hidden, self.borrowed = layer, hidden, borrowed

    def step(self, lanes):
        return self.borrowed.head(self.layer.nudge(self.hidden[lanes.request, lanes.slot], lanes.token, self.borrowed))


class Component(Correction):
    def __init__(self, config, shape):
        super().__init__()
        self.eps, self.inner = shape.rms_norm_eps, nn.Linear(2 * shape.hidden_size, config.rank)
        self.outer = nn.Linear(config.rank, shape.hidden_size, bias=False)
        nn.init.zeros_(self.outer.weight)

    def nudge(self, hidden, previous, borrowed):
        parts = [rms_norm(part, self.eps) for part in (hidden, borrowed.embed(previous).to(hidden.dtype))]
        return hidden + self.outer(nn.functional.silu(self.inner(torch.cat(parts, -1))))

    def forward(self, hidden, previous, borrowed, supervised=None):
        return borrowed.head(self.nudge(select(hidden, supervised), select(previous, supervised), borrowed))

    def start(self, hidden, borrowed):
        return NudgeState(self, hidden, borrowed)


# %% [markdown]
# Saved as `my_package/nudge.py` it would be found by that dotted path; saved as `treedraft/corrections/nudge.py` it would be called
# `nudge`, and the contract tests would run over it. Here the notebook itself is the module:

# %%
sys.modules["my_package.nudge"] = sys.modules["__main__"]

# %% [markdown]
# ## Training text
#
# A drafter learns from the target's own answers; here from some thousand tokens of them.

# %%
bench = Workbench("pocket", cache_gb=1)
few = Settings(prompts="world", tokens=8_000, max_new_tokens=96, batch_size=64, prompts_per_shard=112)
answers = Path(scratch.name) / "answers"
print(f"{sum(len(item.ids) - item.prompt_length for item in regenerate(bench.target, few, answers)):,} tokens of answers")

# %% [markdown]
# ## A grid of three
#
# The same backbone, the same text, the same few steps.

# %%
grid_file = Path(scratch.name) / "mine.toml"
grid_file.write_text(f"data.folder = '{answers}'\n" + """
question = "Does a nudge help?"
target = "pocket"
drafter = { block_size = 8, tap_layers = [1, 3, 5], backbone = { name = "causal", num_layers = 1 } }
train = { optimizer = "muon", learning_rate = 1e-2, decay = 7.0, steps = 80, sequences = 4, anchors = 8 }
decode = { mode = ["chain", "tree"], depth = 7, budget = 64, temperature = 1.0 }
evaluate = { count = 30, seeds = [0], max_new_tokens = 64 }
compare = [["*/nudge", "*/none"], ["*/nudge", "*/markov"]]

[[arms]]
correction = ["none", { name = "markov", size = 1 }, { name = "my_package.nudge" }]
""")
grid = load_grid(grid_file)
for arm in grid.arms:
    print(arm.label)

# %% [markdown]
# Train and measure (`python -m treedraft.ablate --grid mine.toml` does this with bars, side by side, and goes on where it was killed):

# %%
with contextlib.redirect_stderr(io.StringIO()):
    for cell in grid.cells:
        bench.train(cell.arm)
        bench.evaluate(cell)
write_rows(Path(scratch.name), grid, *collect(grid.cells, {}, grid.name))

# %%
study = report.load_study(Path(scratch.name), grid.name)
Markdown(report.tau_table(study, 1.0).markdown())

# %% [markdown]
# *tau after a training this short says how fast a correction learns, not how good it gets.*

# %%
panels = {
    mode: {label: study.arm(label, 1.0, mode, 7).survival for label in study.labels} for mode in study.modes
}
figures.curves_figure(panels, x="draft position d (tokens)", y="share of rounds that accept at least d", title="How far drafts get")

# %% [markdown]
# *A line above another keeps more rounds alive. Is the difference more than luck?*

# %%
Markdown(report.comparison_table(study, 1.0).markdown())

# %% [markdown]
# *A verdict needs an interval without 0 and a gap worth naming. With one training seed it is about checkpoints, not methods.*

# %% [markdown]
# ## The law
#
# Folding `step` along a path gives what `forward` gives under teacher forcing with that path's tokens, siblings never leak in, and a
# fresh correction changes nothing. So build a tree with `step`, and score every one of its paths with `forward`, in float64.

# %%
nudged = next(arm for arm in grid.arms if arm.label.endswith("nudge"))
drafter = bench.drafter(nudged).double()
drafter.borrow(bench.target, bench.target.head_weight)
hidden = torch.randn((1, drafter.depth, bench.target.hidden_size), dtype=torch.float64, generator=torch.Generator().manual_seed(0))
anchor = torch.tensor([65])

with torch.no_grad():
    tree = BestFirst(budget=60, width=4, depth=drafter.depth).build(anchor, drafter.scorer(hidden, anchor)).tree(0)
    worst = 0.0
    for node in range(1, len(tree)):
        path = tree.path_to(node)
        law = drafter.correction(hidden[:, : len(path) - 1], tree.tokens[path[:-1]][None], drafter.lent).log_softmax(-1)[0]
        worst = max(worst, abs(float(law[torch.arange(len(path) - 1), tree.tokens[path[1:]]].sum() - tree.scores[node])))

assert worst < 1e-9
print(f"{len(tree)} nodes down to depth {int(tree.depths.max())}; largest difference of log q between step and forward: {worst:.1e}")

# %%
fresh = Component(Config(), drafter.shape).double()
with torch.no_grad():
    tokens = torch.arange(drafter.depth)[None]
    assert torch.equal(fresh(hidden, tokens, drafter.lent), drafter.lent.head(hidden))
print("a fresh correction changes no bit")

# %% [markdown]
# *The tree's scores came from `step`, node by node, among siblings; `forward` saw one path at a time. If a sibling had leaked in, the
# two would differ.*
#
# Break it to see the check fail: let `step` use `lanes.slot - 1`, or start `outer` with random weights.

# %%
scratch.cleanup()
