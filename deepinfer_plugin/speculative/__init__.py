"""Speculative decoding: how many drafts to verify, which of them were right, and what to report.

Pure, needing neither SGLang nor a model:

    planner      how many rows the next verification gets, and which drafts get them
    step_cost    what a step of so many rows costs: measured, cached, corrected while serving
    calibration  from the confidence head's logits to survival probabilities that can be believed
    acceptance   which drafts of a ragged verify block stand: those that the network chose or drew itself
    metrics      drafted, trimmed, verified, accepted; predicted against real

Where SGLang is met:

    algorithm    the name SGLang knows us by; draft_input, verify: what it carries for us and the rows of a verification
    worker       a step: verify, accept, draft; sampling: SGLang's own sampler over verification rows
    seeds        seeds for requests that sample, whose drafts share the noise of their draws
    schedule     the planner fed and applied batch by batch; profile_step: the curve of a served network
    export       Prometheus
"""
