"""Decides which workers serve a request and when. No I/O, no clock of its own, no event loop.

    pool       owns the fleet view and the leases; picking and reserving is one step
    line       one model's admission: bounds, rates, Retry-After     queue      whose turn it is: tenants, priorities, arrival
    select     the one decision (filter → score → pick)              slots      what a worker was given, what a request owns
    prefixes   who holds which prompt's beginning                    breakers   which pairs are not to be used for now
    verdict    whether disaggregation pays by the measured rates     budget     how many requests may be tried again
    tokens     lengths learned from engines                          rate       how fast prompts are worked off

`reasons` is the closed vocabulary that metrics and receipts use. The asynchronous edge is `server/admission`.
"""
