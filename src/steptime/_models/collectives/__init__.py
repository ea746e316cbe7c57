"""How long collectives take by themselves: from the last rank's arrival to the end, per kind, rank count and link tier.

`message.Messages` are questions as columns, an uneven all_to_all as the even one that takes as long; `tier.Curve` is one
continuous, monotone law of time over bytes; `tier.TierModel` has a curve for every kind and rank count of one tier of links and
knows what to say between and beyond them; `spanning` puts tiers together for groups over several nodes.
"""
