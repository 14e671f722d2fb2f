"""Setup before the first step: probes on a few samples of the training data, with the user's own collator.

    1. units    cutting.find_units          units into which the model can be split; makes weights equal everywhere
    2. loss     reduction.find_reduction    how the losses of a batch's parts combine to the loss of the batch
    3. slices   slicing_setup               whether sequences can be split along their tokens, if that is requested
    4. times    cutting.time_model          seconds of each unit, if a decision depends on them

`placing.examine` calls them in this order, and `placing.first_layout` chooses the layout to begin with.
"""
