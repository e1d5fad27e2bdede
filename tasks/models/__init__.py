"""Models as `nn.Cell`s, and what is around them: weights, adapters, generation. Tensors in, tensors out.

Nothing here knows Prefect, the artifact store or the configuration: a Cell receives numbers and sub-cells. `spec`,
`headers` and `adapter` import no MindSpore, so that planning can use them.

Shape letters, the same in all comments and docstrings of the project:

| letter | meaning |
|---|---|
| B | batch, rows that are computed together |
| T | tokens of a row |
| S | rows of keys and values that T tokens look at (S = T without a cache) |
| D | width of the model (hidden size) |
| H | query heads |
| K | key and value heads; K divides H |
| C | size of a head |
| R | rank of a low-rank update |
| V | vocabulary, rows of the embedding |
| F | width inside the feed-forward part (intermediate size) |
"""
