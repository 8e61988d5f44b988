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
)
PRODUCTS = ("einsum(f'b h i", KEYS[1])
NORMS = ("merge_reductions", "needed: a norm's sums, of all ranks in one gather in place of several sums")
NODES = (
    (
        "scatter",
        "needed here: the norm of GCN adds plain ones up by the numbers of the edges, and has them whole for that",
    ),
)
MARGINS = ("nn.pad(", "needed: the few rows at both ends that a margin repeats, and their gradient")
PARTS = (
    "scaled_dot_product_attention(G",
    "needed: by these numbers the ranks' parts of a softmax over all points are merged",
)
MODES = ("compl_mul2d", "needed: the gradient of a plain weight, of which each rank has that of some modes")
TABLE = ("pos_embed", "needed: the gradient of a plain table, of which each rank has that of some rows")
PLACED = (
    ("kept_modes", "not needed: what is written into some rows of another tensor could be sent to their ranks"),
    TABLE,
    ("+ bias", "not needed: the rows that go around the modes, whole only since these were gathered"),
)
KEPT = (
    ("kept] = self.act(", "not needed: what is written into some rows of a plain tensor, which is whole"),
    ("x_out + residual", "not needed: whole only since the modes were"),
    TABLE,
)
BIAS = (
    (
        "earth_position_bias",
        "needed: the gradient of a plain tensor is plain, and each rank has that of some rows",
    ),
)
WINDOWS = (("attn = q @ k", KEYS[1]), ("x = (attn @ v)", KEYS[1]))
