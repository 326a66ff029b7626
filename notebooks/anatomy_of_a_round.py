# %% [markdown]
# # Anatomy of a round
#
# A round of speculative decoding *drafts* a block of tokens, grows a *tree* from it, *verifies* the whole tree in one forward of
# the target, *accepts* one path and *commits* it. Here is one round taken apart, on `pocket` (a small chat model that ships with
# the package), and then whole answers, there and on SmolLM2-135M.

# %%
import torch
from IPython.display import display

from treedraft import figures, generate, load_drafter, load_target
from treedraft.config import DecodeConfig
from treedraft.drafter import Prefix
from treedraft.speculate import generate_plain
from treedraft.trees.accept import accept
from treedraft.trees.best_first import BestFirst

target = load_target("pocket")
drafter = load_drafter("causal-attention", target=target)


def text_of(token):
    return target.tokenizer.decode([token])


# %% [markdown]
# ## The prefix and its anchor
#
# The round starts in the middle of an answer. All but the last token are *committed*: the target has their keys and values, the
# drafter the features tapped from them. The last one, the *anchor*, has been emitted but not been fed to the target yet.

# %%
prompt = target.encode_chat(["Write a Python function that checks whether a number is prime."])
answer = generate_plain(target, prompt, max_new_tokens=64).ids
so_far = answer[:11]

committed = target.prefill(prompt + so_far[:-1])
prefix = Prefix(drafter)
prefix.append(committed.taps)
anchor = torch.tensor(so_far[-1:])
print(target.decode(so_far))

# %% [markdown]
# ## Draft and tree
#
# One forward of the drafter fills all 15 slots at once. The correction then says how likely each token is *under its own
# ancestors*, and the tree takes the 24 best nodes by the product of these probabilities.

# %%
with torch.no_grad():
    position = torch.tensor([[target.length]])
    hidden = drafter.hidden(prefix.memory, anchor[None], position, drafter.depth)[:, 0]
    scorer = drafter.scorer(hidden, anchor)
    tree = BestFirst(budget=24, width=4, depth=drafter.depth, admit="pop").build(anchor, scorer).tree(0)
print(f"{len(tree)} nodes, the deepest at depth {int(tree.depths.max())}")

# %% [markdown]
# ## Verify and accept
#
# One forward of the target over all nodes gives its own choice after each of them. From the anchor on, the child that carries
# this choice is followed as long as there is one; the choice after the last node is a free *bonus* token.

# %%
verified = target.verify(tree.tokens, tree.parents)
path, bonus = accept(tree, lambda path: int(verified.logits[path[-1]].argmax()))
figures.tree_figure(tree, text_of, path=path, bonus=bonus)

# %% [markdown]
# *Blue is what the target would have written anyway. Where it leaves the likeliest branch, the top row, a single chain ends.*

# %% [markdown]
# ## What the target saw
#
# All nodes go through one forward, so a mask keeps branches apart: a node sees the prefix, its ancestors and itself.

# %%
figures.mask_figure(tree, text_of, prefix_length=target.length, path=path)

# %% [markdown]
# *A row is a node that looks, a column what it looks at. The blue rows are a text without gaps; the grey ones are other texts that
# share its beginning.*

# %% [markdown]
# ## Commit
#
# The accepted rows become the tail of the prefix, in the target's cache and in the drafter's memory. Nothing else stays.

# %%
target.commit(path)
prefix.append(verified.taps[path])
emitted = [*tree.tokens[path[1:]].tolist(), bonus]
assert emitted == answer[len(so_far) :][: len(emitted)]
print(f"one forward of the target, {len(emitted)} tokens: {target.decode(emitted)!r}")

# %% [markdown]
# ## A whole answer
#
# `generate` does this until the answer ends.

# %%
config = DecodeConfig(mode="tree", depth=15, width=4, budget=24, admit="pop")
result = generate(target, drafter, prompt, config=config, max_new_tokens=64)
figures.rounds_figure(result.rounds, title="pocket, causal-attention, 24 nodes a round")

# %% [markdown]
# *A row is a forward of the target. Blue and orange tokens were emitted; grey shows how deep the tree went in vain.*

# %% [markdown]
# ## Nothing was lost
#
# The output is that of plain decoding, one token a forward, id for id.

# %%
assert result.ids == answer
print(f"{len(result.ids)} tokens, identical; {len(result.rounds)} forwards behind the prompt's instead of {len(answer) - 1}")
print(result.text)

# %% [markdown]
# ## A real chat model
#
# The same on SmolLM2-135M-Instruct with the drafter that ships for it. Its weights are fetched once; where there is no network,
# the cells below have nothing to show.

# %%
try:
    target = load_target("smollm2-135m")
    drafter = load_drafter("causal-attention", target=target)
except ValueError as error:
    target = None
    print(f"skipped: {error}")

# %%
if target:
    prompt = target.encode_chat(["Write a Python function that checks whether a number is prime."])
    result = generate(target, drafter, prompt, config=config, max_new_tokens=48)
    assert result.ids == generate_plain(target, prompt, max_new_tokens=48).ids
    print(f"identical to plain decoding: {len(result.ids)} tokens in {len(result.rounds)} rounds\n\n{result.text}")

# %% [markdown]
# The round that accepted most:

# %%
if target:
    number = max(range(len(result.rounds)), key=lambda number: result.rounds[number].emitted)
    best = result.rounds[number]
    following = result.ids[sum(item.emitted for item in result.rounds[: number + 1])]
    display(figures.tree_figure(best.tree, text_of, path=best.path, bonus=following, title=f"smollm2-135m, round {number + 1}"))

# %% [markdown]
# *Where a drafter is sure a tree is a line, where it is not the tree fans out.*

# %%
if target:
    display(figures.rounds_figure(result.rounds, title="smollm2-135m, causal-attention, 24 nodes a round"))

# %% [markdown]
# *Long rounds and short ones: tau is their mean.*
#
# Next: [what happens beyond the trained depth](depth_extrapolation.ipynb).
