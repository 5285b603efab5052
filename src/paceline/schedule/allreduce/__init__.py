"""All-reduce as data: rounds of sends, by one file for each algorithm, their proof, price and picture."""
