"""How each stage works: one module per stage, the artifact store, and the code they share."""
