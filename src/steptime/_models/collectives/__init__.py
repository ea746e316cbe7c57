"""How long collectives take by themselves: from the last rank's arrival to the end, per kind, rank count and link tier.

`message.Messages` are questions as columns; `curve.Curve` is one continuous, monotone law of time over bytes; `tier.TierModel`
has a curve for every kind and rank count of one tier of links and knows what to say between and beyond them; `exchange` turns
an uneven all_to_all into the even one that takes as long; `spanning` puts tiers together for groups over several nodes.
"""
