"""Words that several tasks draw from. Each stands in one list only, so that none leaks."""

from __future__ import annotations

from loraserve.demo.smollm.tasks.task import Words

PEOPLE = Words.split(
    "Anna, Ben, Clara, Daniel, Emma, Felix, Grace, Hugo, Iris, Jack, Kate, Leo, Maria, Nina, Oscar, Paula, Rosa, "
    "Simon, Tara, Victor, Wendy, Yara, Zoe, Alice, Boris, Chloe, Diego, Elsa, Frank, Greta, Henry, Ida, Jonas, Laura, "
    "Martin, Nadia, Olga, Peter, Quentin, Rita, Sam, Teresa, Ulrich, Vera, Walter, Lena, Tom, Julia"
)
CITIES = Words.split(
    "Paris, Berlin, Madrid, Lima, Tokyo, Milan, Boston, Dublin, Toronto, Lisbon, Vienna, Oslo, Prague, Athens, Cairo, "
    "Chicago, Denver, Geneva, Hamburg, London, Munich, Naples, Rome, Seville, Sydney, Venice, Warsaw, Zurich, Delhi, "
    "Seattle, Moscow, Dallas, Houston, Kyoto, Lagos, Miami, Montreal, Nairobi, Phoenix, Stockholm"
)
GOODS = Words.split(
    "lamps, chairs, bikes, books, coats, tables, mirrors, carpets, clocks, candles, plates, knives, towels, pillows, "
    "curtains, shelves, keyboards, printers, cameras, radios, drums, guitars, tents, helmets, gloves, scarves, boots, "
    "jackets, shirts, umbrellas, suitcases, backpacks, bottles, pans, kettles, spoons, vases, hammers, ladders, ropes"
)
WEEKDAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
NUMBER_WORDS = ("two", "three", "four", "five", "six", "seven", "eight", "nine", "ten", "eleven", "twelve")
"""Two to twelve."""
