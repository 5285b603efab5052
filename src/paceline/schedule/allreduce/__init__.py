"""All-reduce algorithms as data: rounds of sends, one file for each algorithm, with proof, cost model and diagram."""
