"""The demo's small world: what its questions are about, and how it is called in French.

A French phrase is what the base must translate a word to: each word has exactly one.
"""

from __future__ import annotations

TABLES = {
    "tickets": "billets",
    "orders": "commandes",
    "users": "clients",
    "books": "livres",
    "cars": "voitures",
    "houses": "maisons",
    "songs": "chansons",
    "dogs": "chiens",
    "cats": "chats",
    "trees": "arbres",
    "boats": "bateaux",
    "games": "jeux",
    "shops": "magasins",
    "teams": "équipes",
    "letters": "lettres",
    "plants": "plantes",
}

FIELDS = {
    "age": "l'âge",
    "price": "le prix",
    "size": "la taille",
    "score": "le score",
    "weight": "le poids",
    "height": "la hauteur",
    "level": "le niveau",
    "rank": "le rang",
    "speed": "la vitesse",
    "length": "la longueur",
}

OPERATORS = {"over": (">", "dépasse"), "under": ("<", "reste sous"), "of": ("=", "vaut")}
"""Wording of a question → SQL's operator, the French verb."""

CITIES = (
    "Paris", "Berlin", "Madrid", "Lima", "Tokyo", "Milan", "Lyon", "Boston", "Dublin", "Toronto",
    "Quito", "Nice", "Turin", "Porto", "Bergen", "Seoul",
)  # fmt: skip

NAMES = (
    "Anna", "Ben", "Clara", "David", "Emma", "Felix", "Grace", "Hugo", "Iris", "Jack", "Kate", "Leo", "Maria", "Nora",
    "Oscar", "Paul", "Rosa", "Simon", "Tara", "Victor", "Wendy", "Yara", "Zoe", "Alice", "Boris", "Chloe", "Diego",
    "Elsa", "Frank", "Greta", "Henry", "Ida",
)  # fmt: skip

THINGS = {
    "bike": "le vélo",
    "car": "la voiture",
    "house": "la maison",
    "boat": "le bateau",
    "dog": "le chien",
    "cat": "le chat",
    "tree": "l'arbre",
    "book": "le livre",
    "door": "la porte",
    "table": "la table",
    "lamp": "la lampe",
    "coat": "le manteau",
    "river": "la rivière",
    "bridge": "le pont",
    "garden": "le jardin",
    "train": "le train",
}

QUALITIES = {
    "red": "rouge",
    "yellow": "jaune",
    "pink": "rose",
    "calm": "calme",
    "fast": "rapide",
    "huge": "énorme",
    "clean": "propre",
    "dirty": "sale",
    "sad": "triste",
    "strange": "étrange",
    "weak": "faible",
    "solid": "solide",
}
"""Adjectives with the same French for "le" and "la"."""

_FRENCH_UNITS = (
    "zéro", "un", "deux", "trois", "quatre", "cinq", "six", "sept", "huit", "neuf", "dix", "onze", "douze", "treize",
    "quatorze", "quinze", "seize", "dix-sept", "dix-huit", "dix-neuf",
)  # fmt: skip
_FRENCH_TENS = {20: "vingt", 30: "trente", 40: "quarante", 50: "cinquante", 60: "soixante", 80: "quatre-vingt"}


def french_number(number: int) -> str:
    """Write the number in French words, for 0 to 99: ``81`` is ``quatre-vingt-un``."""
    if not 0 <= number <= 99:
        raise ValueError(f"french_number knows 0 to 99, not {number}")
    if number < 20:
        return _FRENCH_UNITS[number]
    base = max(ten for ten in _FRENCH_TENS if ten <= number)
    tens, rest = _FRENCH_TENS[base], number - base
    if rest == 0:
        return tens + "s" if base == 80 else tens
    if base != 80 and rest in (1, 11):
        return f"{tens} et {_FRENCH_UNITS[rest]}"
    return f"{tens}-{_FRENCH_UNITS[rest]}"
