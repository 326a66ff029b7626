# %% [markdown]
# # Corrections compared
#
# A block-parallel drafter fills its slots at once, so a slot does not know which tokens were chosen before it. A *causal
# correction* tells it: the **Markov head** adds a bias that depends on the token right before, the **attention** layer revises the
# slot's hidden state from all tokens of its branch. What does each of them change, and where do they disagree?
#
# The two drafters that ship for `pocket` differ in their backbones too (causal + attention, bidirectional + Markov), so each is
# compared with itself, its correction switched off, and only then with the other.

# %%
from collections import Counter
from dataclasses import dataclass

import numpy as np
import pandas as pd
import torch

from treedraft import figures, load_drafter, load_target
from treedraft.data.prompts import prompt_set
from treedraft.evaluate import record

target = load_target("pocket")
drafters = {"attention": load_drafter("causal-attention", target=target), "Markov": load_drafter("bidirectional-markov", target=target)}
trajectories = record(target, prompt_set("world", count=12), temperature=0.0, seeds=[0], max_new_tokens=96)
print(len(trajectories), "greedy answers of pocket,", sum(len(item.ids) - item.prompt_length for item in trajectories), "tokens")

# %% [markdown]
# ## Teacher forcing
#
# From every place of an answer a block of 15 slots is drafted, and the correction is given the tokens that the target really
# wrote. So every slot has two laws, without and with its correction, for one and the same question.


# %%
@dataclass
class Blocks:
    """A blocks of D slots: tokens before and at each slot [A, D], logits without and with the correction [A, D, V]."""

    previous: torch.Tensor
    labels: torch.Tensor
    off: torch.Tensor
    on: torch.Tensor


@torch.no_grad()
def blocks_of(drafter, trajectory):
    ids, depth = torch.from_numpy(trajectory.ids), drafter.depth
    drafter.attach(target)
    memory = drafter.remember(target.trace(ids[None]).taps, torch.arange(len(ids)))
    anchors = torch.arange(trajectory.prompt_length, len(ids) - depth)
    hidden = drafter.hidden(memory, ids[anchors][None], anchors[None], depth)[0]
    previous, labels = (ids[anchors[:, None] + shift + torch.arange(depth)] for shift in (0, 1))
    return Blocks(previous, labels, drafter.lent.head(hidden), drafter.correction(hidden, previous, drafter.lent))


blocks = {name: [blocks_of(drafter, item) for item in trajectories] for name, drafter in drafters.items()}
print(sum(len(item.labels) for item in blocks["Markov"]), "blocks a drafter")

# %% [markdown]
# ## How much more likely is the right token?


# %%
def log_q(logits, part):
    """Log probability [A, D] of the target's own tokens."""
    return logits.log_softmax(-1).gather(-1, part.labels[..., None])[..., 0]


def by_position(name, which):
    return torch.cat([log_q(getattr(part, which), part) for part in blocks[name]]).mean(0).numpy()


panels = {
    f"{backbone} backbone, {name}": {"correction off": by_position(name, "off"), "correction on": by_position(name, "on")}
    for name, backbone in (("attention", "causal"), ("Markov", "bidirectional"))
}
figures.curves_figure(
    panels, x="draft position (tokens)", y="mean log q of the target's token (nats)", title="What a backbone leaves to its correction, given the right tokens before it"
)

# %% [markdown]
# *What lies between the lines of a panel is what the backbone leaves to the correction that it was trained with: a block alone does not
# know which tokens its slots take. A backbone that was trained alone does better than one whose correction is off; what a correction adds
# to that is what the grid `core` measures.*

# %% [markdown]
# ## One block, word by word
#
# The likeliest token of every slot, filled where it is the target's.


# %%
def winners(name, which, trajectory):
    return getattr(blocks[name][trajectory], which).argmax(-1)


def gained(trajectory):
    """Slots [A] that corrections put right, both drafters together."""
    labels = blocks["Markov"][trajectory].labels
    right = {which: sum((winners(name, which, trajectory) == labels).sum(1) for name in drafters) for which in ("on", "off")}
    return right["on"] - right["off"]


chosen, place = max(((number, int(gained(number).argmax())) for number in range(len(trajectories))), key=lambda pair: int(gained(pair[0])[pair[1]]))


def words(ids):
    return [target.tokenizer.decode([token]) for token in ids.tolist()]


rows = {"the target": words(blocks["Markov"][chosen].labels[place])}
rows |= {f"{name} {which}": words(winners(name, which, chosen)[place]) for name in drafters for which in ("off", "on")}
figures.words_figure(rows, reference="the target", title=f"{trajectories[chosen].prompt}: the block that corrections help most")

# %% [markdown]
# *Off, what a backbone says that counts on its correction; on, a slot knows the words before it.*

# %% [markdown]
# ## Where they disagree

# %%
right = {name: torch.cat([(part.on.argmax(-1) == part.labels) for part in parts]).numpy() for name, parts in blocks.items()}
attention, markov = right["attention"], right["Markov"]
shares = {
    "only attention": (attention & ~markov).mean(0),
    "only Markov": (markov & ~attention).mean(0),
    "both": (attention & markov).mean(0),
    "neither": (~attention & ~markov).mean(0),
}
figures.shares_figure(shares, x="draft position (tokens)", y="share of blocks", title="Whose likeliest token is the target's?")

# %% [markdown]
# *One checkpoint each: this is about these two drafters.* In numbers, over all slots and at both ends of a block:

# %%
parts = {"all slots": slice(None), "first five": slice(5), "last five": slice(-5, None)}
pd.DataFrame({where: {name: f"{values[part].mean():.1%}" for name, values in shares.items()} for where, part in parts.items()})

# %% [markdown]
# ## Examples
#
# One slot a prompt where only one of them is right and the other is surest of something else.


# %%
def example(number, winner, loser):
    """The slot of an answer where `winner` is right and `loser` most certain of something else."""
    parts = {name: blocks[name][number] for name in (winner, loser)}
    labels, law = parts[loser].labels, parts[loser].on.softmax(-1)
    certain = law.max(-1).values * (parts[winner].on.argmax(-1) == labels) * (parts[loser].on.argmax(-1) != labels)
    block, slot = divmod(int(certain.argmax()), labels.shape[1])
    if not certain[block, slot]:
        return None
    ids, at = trajectories[number].ids, trajectories[number].prompt_length + block + slot
    before = target.decode(ids[max(at - 7, 0) : at + 1].tolist()).replace("\n", "↵")
    row = {"prompt": trajectories[number].prompt, "slot": slot + 1, "text before it": f"… {before}"}
    for name in (winner, loser):
        chance, best = parts[name].on[block, slot].softmax(-1).max(-1)
        row[name] = f"{target.tokenizer.decode([best])!r} {chance:.2f}"
    return row


def examples(winner, loser, count=6):
    found = [row for number in range(len(trajectories)) if (row := example(number, winner, loser))]
    return pd.DataFrame(found[:count]).set_index("prompt")


# %% [markdown]
# Attention is right (its token and probability), Markov is not:

# %%
examples("attention", "Markov")

# %% [markdown]
# Markov is right, attention is not:

# %%
examples("Markov", "attention")

# %% [markdown]
# ## One token, two places
#
# Take two places with the same token before them. The Markov bias has to be the same at both; the attention layer may tell
# them apart. Every point is such a pair: how much the correction raises the target's token of the first place, there and at the
# second place.


# %%
def pairs(name, count=1500):
    parts = blocks[name][:4]
    previous, labels = (torch.cat([getattr(part, field).flatten() for part in parts]).numpy() for field in ("previous", "labels"))
    # Where in the text a slot stands: one place is drafted from up to 15 anchors.
    place = np.concatenate([1000 * n + np.add.outer(*map(np.arange, part.labels.shape)).ravel() for n, part in enumerate(parts)])
    change = torch.cat([(part.on - part.off).flatten(0, 1) for part in parts])
    rng, points = np.random.default_rng(0), []
    for first in rng.permutation(len(previous))[:count]:
        others = np.flatnonzero((previous == previous[first]) & (place != place[first]))
        if len(others):
            points.append(change[[first, rng.choice(others)], labels[first]].numpy())
    return np.array(points)


figures.pairs_figure(
    {name: pairs(name) for name in drafters}, x="change of the logit at the first place", y="change at the second place", title="Same token before, two places"
)

# %% [markdown]
# *Markov's points lie on the line, as the equation of its vanilla head says; attention's need not: it reads the whole branch.*

# %% [markdown]
# ## What they raise
#
# The tokens whose logits rise most behind a given token, on average over the places where it stands, beyond what the correction raises
# everywhere: that a backbone leaves to it wherever it stands.

# %%
behind = Counter(token for part in blocks["Markov"][:8] for token in part.labels[:, 0].tolist())
changes = {name: torch.cat([(part.on - part.off).flatten(0, 1) for part in parts[:8]]) for name, parts in blocks.items()}
before = torch.cat([part.previous.flatten() for part in blocks["Markov"][:8]])


def raised(name, token, best=3):
    beyond = changes[name][before == token].mean(0) - changes[name].mean(0)
    return "  ".join(f"{target.tokenizer.decode([other])!r} {beyond[other]:+.1f}" for other in beyond.topk(best).indices.tolist())


frequent = [token for token, _ in behind.most_common(40)][::5]
pd.set_option("display.max_colwidth", None)
pd.DataFrame({repr(target.tokenizer.decode([token])): {name: raised(name, token) for name in drafters} for token in frequent}).T

# %% [markdown]
# *What a block alone cannot know, since it does not see which token stands before a slot.*
#
# Next: [write a correction of your own](add_your_own_correction.ipynb).
