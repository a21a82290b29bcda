"""What the layers run on: deadlines, worker threads, frame memory, byte budgets.

Layer: bottom. `threads` and `budget` hand work to and from the event loop; `arena` and `deadline`
know no loop.
"""
