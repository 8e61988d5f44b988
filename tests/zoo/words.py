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
    ("position_embeddings", PLACES[1]),
    ("token_type_embeddings", "not needed: the table has two rows, but plain ids look it up, which no op of ours sees"),
)
NODES = (
    ("index", "needed here: edges are cut as they come, and name nodes of all ranks; `sc.link_rows` fetches each once"),
    ("scatter", "needed here: likewise"),
)
