"""A passage of plain English prose, for measurements on real text.

Written for this project and dedicated to the public domain (CC0).
"""

PASSAGE = """\
The ferry left the island at ten past seven, as it had done every morning since the new pier was built. On board were \
a schoolteacher with a box of library books, two electricians who had spent the week repairing the lighthouse, and an \
elderly man who carried nothing but a folded newspaper. The sea was calm. A thin layer of mist lay over the water, \
and behind it the hills of the mainland looked as if somebody had cut them out of grey paper.

"You are early today," the captain said to the old man. "The market doesn't open until nine."

"I am not going to the market," he answered. "My granddaughter has her first day at work, and I promised to walk with \
her to the door. She says that she isn't nervous, but she asked me three times whether I would come."

The captain laughed and went back to the wheel. In the cabin, the younger of the two electricians was explaining why \
the lamp had failed. Salt had crept into a joint that should have been sealed, he said, and over the years it had \
eaten the copper until only a green powder was left. Nobody had noticed, because the spare circuit had taken over by \
itself. When that failed too, the light went out in the middle of the night, and a fishing boat ran onto the \
sandbank. No one was hurt, but the crew had to wait for the tide, and by then half of their catch was spoiled.

"So what did you change?" asked the teacher, who had been listening.

"The joint, of course, and about forty metres of cable. But the most important thing is a small red lamp in the \
harbour office. It goes on when the first circuit fails, and not when everything is dark already. It costs less than \
a cup of coffee."

She thought about this for a while. There was a lesson in it, she decided, that her pupils would understand better \
than most of what stood in their books: a system that repairs itself in silence is only half a blessing, since nobody \
learns that it is broken. She took a pencil out of her pocket and wrote the sentence down on the back of a ticket, so \
that she wouldn't forget it before the bell rang.

At twenty to eight the ferry reached the mainland. The mist had gone, and the first buses were waiting in the square \
with their engines running. The old man stepped ashore, looked at the clock above the station, and began to walk \
faster than anyone would have expected of him. On the steps of the town hall stood a young woman in a blue coat. When \
she saw him she raised her hand, and then, because it was still early and the street was almost empty, she ran.
"""
