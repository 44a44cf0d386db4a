"""Common English words for the small text tasks, and how they are split.

Owns: the list. Does not know: what is asked about a word.
"""

from __future__ import annotations

import hashlib

_TEXT = """
able about above accept account across action active actor adult advice after again agent agree ahead airport album
alive almost alone along already also always amount anchor angle angry animal ankle answer apple april area argue arm
army around arrive arrow artist aside asleep august aunt author autumn avenue avoid awake away baby back bacon badge
baker balance ball banana band bank barber bargain barrel base basin basket bath battle beach bean bear beard beauty
become bed bee before begin behind bell belong below belt bench berry beside better beyond bicycle bird birth biscuit
bitter black blade blanket blind block blood blossom blow blue board boat body bone book border bottle bottom bowl boy
brain branch brave bread break breath brick bridge bright bring broad brother brown brush bubble bucket build bundle
burn bus bush busy butter button buyer cabin cable cactus cage cake calendar call calm camel camera camp canal candle
candy canyon captain card careful carpet carrot carry castle cattle cause ceiling cellar center chain chair chalk
change cheap check cheese cherry chest chicken child chimney choice church circle city class clay clean clever cliff
climb clock cloth cloud clown coach coast coat coffee coin cold collar color column comfort common copper corn corner
cost cotton couch count country cousin cover cow cradle crane cream crime crisp cross crowd crown cruel cry culture
cup curtain curve custom cycle daily dairy dance danger dark daughter dawn day deal dear debt decide deep deer degree
delay dentist desert desk detail device diamond diary dinner dirt dish distance doctor dog doll dollar dolphin donkey
door double doubt down dragon drama drawer dream dress drink drive drop drum duck dust duty each eager eagle early
earn earth easy eat echo edge effect eight elbow elder eleven empty enemy energy engine enjoy enough enter equal error
escape evening event every exact example except exit expert extra eyebrow fable face factory fair faith fall family
famous far farmer fashion father favor fear feather feed fence fever field fifteen fight figure film final finger
finish fire fish flag flame flat flavor flight float flock floor flour flower fly fog fold follow food foot forest
forget fork form fort forward fountain fox frame free fresh friend frog front frost fruit fuel full funny fur future
gallery game garage garden garlic gate gather gentle ghost giant gift giraffe girl give glad glass globe glory glove
glue goal goat gold good goose govern grace grain grand grape grass gravel gray great green grocer ground group grow
guard guess guest guide guitar habit hair half hall hammer hand handle happy harbor hard harvest hat hawk hazel head
health heart heavy hedge height helmet help hen herb hero hidden high hill history hobby hold hole holiday hollow home
honest honey hope horse hospital hotel hour house humble hundred hungry hunter hurry husband ice idea idle image inch
income indeed infant injury ink insect inside invent invite iron island ivory jacket jail jam january jar jaw jelly
jewel job join joke journey joy judge juice july jump june jungle junior jury just kangaroo keep kennel kettle key
kick kidney kind king kiss kitchen kite kitten knee knife knock knot know label ladder lady lake lamb lamp land
language large last late laugh laundry law lazy leaf learn leather left leg lemon length lesson letter level library
lift light lily limit linen lion lips liquid list listen little lizard load loan lobby local lock log lonely long
loose lost loud love low loyal lucky lumber lunch machine magic magnet maid mail major make manage mango manner map
maple marble march margin market marry mask master match meadow meal measure meat medal medicine meet melon member
memory mercy message metal middle might mile milk mill mind minor mirror mist mixture model modern moment money monkey
month moon morning mother motor mountain mouse mouth move much mud muscle museum music mystery nail name napkin narrow
nation nature near neck needle nephew nerve nest never new night nine noble noise noon north nose note nothing
november number nurse nut oak object ocean october offer office often oil old olive once onion only open opera orange
orbit orchard order organ ostrich other outside oven over owl owner oxygen oyster package paddle page pain paint
palace palm pancake panel paper parade parcel parent park parrot party path pause peace peach peanut pearl pencil
people pepper perfect permit person phone photo piano picnic picture piece pigeon pillow pilot pine pink pioneer pipe
pistol pizza place plain planet plant plate play pleasant plenty plum pocket poem point polar police polite pond pony
poor popcorn porch port potato powder power praise present pretty price prince prison prize problem profit promise
proof proud public pudding pull pumpkin pupil puppy purple purse push puzzle quality quarter queen question quick
quiet quilt quite quiz rabbit race radio rain raise ranch range rapid rare raven reach ready real reason record red
regret remain remote rent repair reply report rescue rest return ribbon rice rich ride right ring ripe river road
roast robin rock rocket roof room root rope rose rough round royal rubber rug ruler rumor rural saddle safe sail salad
salmon salt same sand sauce scale scarf school science season seat second secret seed seven shadow shape sharp sheep
shelf shell shine ship shirt shoe shop short shoulder shout shower sick silence silk silver simple singer sister skill
skin sky sleep slice slow small smart smile smoke smooth snail snake snow soap social soft soil soldier solid song
soon sound soup south space spare speak speed spice spider spoon spring square stable stage stairs stamp star start
station steam steel stick stone store storm story stove straw street string strong student study sugar summer sun
supper sure surprise swan sweet swim sword symbol table tail tailor talent talk tall tame target taste taxi teacher
team tears temple tender tennis tent terrace test thank theater thick thief thin thirty thread throat thunder ticket
tide tiger timber time tiny tired toast tobacco today toe together tomato tongue tool tooth torch total touch towel
tower town toy track trade traffic train travel treasure tree trial tribe trip trouble truck true trumpet trust truth
tunnel turkey turtle twelve twin type ugly umbrella uncle under uniform union unit until upper upset urban useful
usual vacant valley value vanilla vase vast vegetable velvet very vessel victory video village vine violet violin
visit voice volcano vote voyage wagon waist wait waiter wake walk wall walnut warm wash watch water wave weak wealth
weapon weather wedding week weight welcome west whale wheat wheel while whisper whistle white whole wide widow wife
wild willow window wine wing winter wise wish witness wolf woman wonder wood wool word work world worm worry worth
wound wrap wreck wrist write wrong yard yawn year yellow yes yesterday yield young youth zebra zero zigzag zinc zipper
zone zoo
"""

WORDS = _TEXT.split()


def split(held_out: bool) -> list[str]:
    """A fifth of the words is held out, chosen by a hash; in the hashes' order, so that any head is a sample."""
    hashes = {word: hashlib.sha256(word.encode()).digest() for word in WORDS}
    return [word for word in sorted(WORDS, key=lambda word: hashes[word][1:]) if (hashes[word][0] % 5 == 0) is held_out]
