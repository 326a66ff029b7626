# %% [markdown]
# # Depth extrapolation
#
# All drafters here were trained to draft 15 tokens. What happens if they are asked for more, up to twice as many, without being
# trained again? The curves come from the committed results of `python -m treedraft.ablate --grid depth`; at the end a shipped drafter
# is decoded live.

# %%
from pathlib import Path

import numpy as np
import pandas as pd
from IPython.display import Markdown

from treedraft import figures, generate, load_drafter, load_target, report
from treedraft.config import DecodeConfig
from treedraft.data.prompts import prompt_set
from treedraft.metrics import survival

study = report.load_study(Path("../ablations/results"), "depth")
print(study.question)
print(study.source())

# %% [markdown]
# ## tau against decode depth
#
# tau counts the tokens that one forward of the target yields: accepted drafts and the bonus token.

# %%
figures.draw(study, "tau")

# %% [markdown]
# *Each line is a drafter, each bar a 95 % interval over prompts; the dotted line is the trained depth.*

# %% [markdown]
# The same as a table: what another depth changes, paired by prompt.

# %%
Markdown(report.extrapolation_table(study, study.headline_temperature).markdown())

# %% [markdown]
# *A causal backbone's first slots do not know how many follow, so its chain at 15 is the beginning of its chain at 31. In a
# bidirectional block every slot sees all others: another length is another block.*

# %% [markdown]
# ## Survival
#
# $S_d$ is the share of rounds that accept at least $d$ tokens, at the deepest setting.

# %%
figures.draw(study, "survival")

# %% [markdown]
# *On this scale a straight line is a constant chance to get one token further; a bend at the dotted line would say that drafting
# beyond it is something else.* What there is to gain beyond the trained depth is bounded by the rounds that get there:

# %%
deepest = max(setting.depth for setting in study.settings)
arms = {label: study.arm(label, study.headline_temperature, "tree", deepest) for label in study.labels}
shares = {
    f"rounds that accept {depth} drafts": {label: f"{arm.survival[depth - 1]:.2%}" for label, arm in arms.items()}
    for depth in (7, 15, 23, deepest)
}
pd.DataFrame(shares)

# %% [markdown]
# *Columns of next to nothing say that trainings as short as the grid's leave nothing to gain there, whatever depth does; the drafter at the
# end of this notebook, which was trained for longer, gets there more often.*

# %% [markdown]
# ## End the drafts where you like
#
# For a chain $\tau = 1 + S_1 + \dots + S_d$, up to the few rounds that the end of an answer cuts. Move the slider: what would drafts
# that end at $d$ give? (Of causal backbones, whose chain at $d$ is the beginning of the longest one.)

# %%
causal = [label for label in study.labels if label.startswith("causal/")]
figures.slider(lambda depth: figures.depth_figure(study, depth, labels=causal), range(1, deepest + 1), start=15, name="depth")

# %% [markdown]
# *A rendered file shows the trained depth; with a running kernel the slider redraws.*

# %% [markdown]
# ## Live, at depth 23
#
# `pocket` and the causal-attention drafter that ships for it. Chains of 23 drafts, greedy.

# %%
target = load_target("pocket")
drafter = load_drafter("causal-attention", target=target)
config = DecodeConfig(mode="chain", depth=23)
prompts = prompt_set("world", count=12)
results = [generate(target, drafter, target.encode_chat(prompt.turns), config=config, max_new_tokens=96) for prompt in prompts]

longest = max(range(len(prompts)), key=lambda number: max(len(item.path) for item in results[number].rounds))
print(f"the drafter: {drafter.provenance['training']['steps']:,} steps of training; those of the grid: {int(study.cells.train_steps.max()):,}")
print(prompts[longest].turns[-1], results[longest].text, sep="\n\n")

# %% [markdown]
# The rounds of this answer, the one with the longest accepted draft of the twelve, side by side:

# %%
figures.rounds_figure(
    results[longest].rounds, origin="anchor", trained_depth=drafter.depth, title=f"{prompts[longest].id}, chain of 23 drafts"
)

# %% [markdown]
# *Grey begins where the target disagreed. Blue to the right of the dotted line are drafts that training never asked for.*

# %% [markdown]
# All twelve answers: where do the drafts end?

# %%
counts = [result.counts() for result in results]
by_domain = {
    domain: survival([item for item, prompt in zip(counts, prompts, strict=True) if prompt.domain == domain], config.depth)
    for domain in sorted({prompt.domain for prompt in prompts})
}
figures.curves_figure(
    {"pocket, causal-attention, greedy": by_domain},
    x="draft position d (tokens)",
    y="share of rounds that accept at least d",
    title="Survival by domain, live",
)

# %%
accepted = np.concatenate([item.accepted for item in counts])
beyond = (accepted > drafter.depth).sum()
print(f"{len(accepted)} rounds on {len(prompts)} prompts, mean accepted {accepted.mean():.2f} of {config.depth} drafts")
print(f"{beyond} rounds ({beyond / len(accepted):.1%}) went past the trained depth of {drafter.depth}")

# %% [markdown]
# Next: [what the two corrections do](corrections_compared.ipynb).
