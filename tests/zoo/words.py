"""What a person says of gathers that many models have."""

KEYS = (
    "attention",
    'needed: each row attends to all others; `config.attention = "ring"` sends blocks one after the other instead',
)
PLACES = (
    "laces",
    "needed: the gradient of a plain lookup is a plain tensor; a sum over the whole table of places would be more",
)
EMBEDDINGS = (
    *(
        (names, PLACES[1])
        for names in ("position_embeddings", "+ position_embeds", "+ positions", "+ embed_pos", "+ pos_emb")
    ),
    ("cumsum", "needed: each rank starts from the sums of those before it, a row of each"),
    ("first_token", "needed: the first word's row, of which a result is made that is whole on all ranks"),
    ("token_type_embeddings", "not needed: the table has two rows, but plain ids look it up, which no op of ours sees"),
)
CLASSES = (
    "torch.cat(",
    "not needed: the gradient of a plain row that was expanded over the batch, of which a sum of one row would do",
)
PRODUCTS = ("einsum(f'b h i", KEYS[1])
NEAREST = (
    ("nearest", "not needed: each row goes to two beside it, but the cut of what was halved is a new one"),
    ("self.conv(hidden_states)", "not needed: the gradient of such rows"),
)
NORMS = ("merge_reductions", "needed: a norm's sums, of all ranks in one gather in place of several sums")
NODES = (
    ("index", "needed here: edges are cut as they come, and name nodes of all ranks; `sc.link_rows` fetches each once"),
    ("scatter", "needed here: likewise"),
)
