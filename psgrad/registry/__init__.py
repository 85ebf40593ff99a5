"""What a rule is, which torch function has which rule, and parameters as rules meet them."""
