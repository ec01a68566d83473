"""Loops over rows and tokens, in plain Python numbers, written from the papers; nothing of the package is used."""

import math


def bounded(x, low, high):
    return min(max(x, low), high)


def clip_term(r, a, epsilon=0.2, epsilon_high=None, delta=None):
    high = epsilon if epsilon_high is None else epsilon_high
    objective = min(r * a, bounded(r, 1 - epsilon, 1 + high) * a)
    if delta is not None and a < 0:
        objective = max(objective, delta * a)
    return -objective


def cispo_term(r, a, logp, epsilon, epsilon_high):
    return -bounded(r, max(1 - epsilon, 0), 1 + epsilon_high) * a * logp


def sapo_term(r, a, sapo_temperature_pos=1.0, sapo_temperature_neg=1.05):
    tau = sapo_temperature_pos if a > 0 else sapo_temperature_neg
    return -a * 4 / tau / (1 + math.exp(-tau * (r - 1)))


def dis_term(r, a, epsilon=0.3, epsilon_high=5.0):
    return -r * a if 1 - epsilon < r < 1 + epsilon_high else 0.0


def gmpo_row(log_ratios, advantages, epsilon=0.4, epsilon_high=None):
    """One row's loss; the signed form: sgn(A) · min(sgn(A) w, sgn(A) clip(w))."""
    high = epsilon if epsilon_high is None else epsilon_high
    signed = []
    for w, a in zip(log_ratios, advantages, strict=True):
        sign = math.copysign(1, a)
        signed.append(sign * min(sign * w, sign * bounded(w, -epsilon, high)))
    return -math.exp(sum(signed) / len(signed)) * sum(advantages) / len(advantages)


def row_terms(surrogate, logps, log_ratios, advantages, **settings):
    """Terms of the unmasked tokens of one row."""
    if surrogate == "gmpo":
        return [gmpo_row(log_ratios, advantages, **settings)] * len(logps)
    terms = []
    for logp, w, a in zip(logps, log_ratios, advantages, strict=True):
        if surrogate == "reinforce":
            terms.append(-a * logp)
        elif surrogate == "cispo":
            terms.append(cispo_term(math.exp(w), a, logp, **settings))
        else:
            function = {"clip": clip_term, "sapo": sapo_term, "dis": dis_term}[surrogate]
            terms.append(function(math.exp(w), a, **settings))
    return terms


def policy_loss_oracle(
    logps, old_logps, advantages, mask, *, surrogate, ratio_level="token", aggregation="token_mean", weights=None, **kw
):
    """Loss of nested lists; `advantages` and `weights` per token."""
    row_sums, row_counts = [], []
    for i, mask_row in enumerate(mask):
        places = [t for t, m in enumerate(mask_row) if m]
        if not places:
            continue
        w = [logps[i][t] - old_logps[i][t] for t in places]
        if ratio_level != "token":
            w = [sum(w) / len(w)] * len(w)
        terms = row_terms(surrogate, [logps[i][t] for t in places], w, [advantages[i][t] for t in places], **kw)
        factors = [1.0 if weights is None else weights[i][t] for t in places]
        if surrogate == "gmpo":
            factors = [math.prod(factors) ** (1 / len(factors))] * len(factors)
        row_sums.append(sum(f * x for f, x in zip(factors, terms, strict=True)))
        row_counts.append(len(places))
    if aggregation == "token_mean":
        return sum(row_sums) / sum(row_counts)
    if aggregation == "seq_mean_token_mean":
        return sum(s / n for s, n in zip(row_sums, row_counts, strict=True)) / len(row_counts)
    return sum(row_sums) / len(row_counts) / (len(mask[0]) if aggregation == "seq_mean_token_sum_norm" else 1)
