"""Words of the synthetic shop: 12 domains of 14 kinds of goods, each in English and Chinese.

Invariants:
- Everything here was made up for this package; brands are put together from syllables and stand for nobody.
- No two values of one axis, or of one option, pass for each other in `reward.matches` (tested): what is bought wrong
  is scored wrong.
- A pair is written "english=chinese".
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Final

__all__ = ["COLOURS", "DOMAINS", "LANGUAGES", "Axis", "Domain", "colours", "domains"]

LANGUAGES: Final = ("en", "zh")

COLOURS: Final = (
    "colour=颜色",
    "black=黑色, white=米白, red=正红, navy=藏青, teal=湖蓝, olive=橄榄绿, amber=琥珀黄, coral=珊瑚粉, plum=梅子紫, "
    "grey=银灰",
)

DOMAINS: Final = (
    (
        "kitchen=厨房用品",
        "kettle=烧水壶, frying pan=平底锅, chopping board=砧板, coffee grinder=磨豆机, lunch box=饭盒, "
        "rice cooker=电饭煲, bread bin=面包箱, salad bowl=沙拉碗, teapot=茶壶, cake mould=蛋糕模具, "
        "spice rack=调料架, knife block=刀座, juicer=榨汁机, toaster=吐司炉",
        "material=材质: enamel=珐琅, ceramic=陶瓷, bamboo=竹制, borosilicate=高硼硅, copper=紫铜",
        "cleaning=清洁: dishwasher safe=可进洗碗机, wipe clean=一擦即净, removable tray=托盘可拆, "
        "self rinsing=自动冲洗, stain proof=不留污渍",
        "handle=手柄: cork grip=软木把手, folding handle=折叠提手, walnut knob=胡桃木旋钮, "
        "silicone sleeve=硅胶护套, leather strap=皮革拎带",
        "strength=特点: keeps heat long=长效保温, scratch resistant=耐刮耐磨, space saving=节省空间, "
        "very quiet=静音运行, child lock=童锁保护",
        "capacity=容量: 400 ml=四百毫升, 0.8 litre=八百毫升以上, 1.7 l=一点七升, family=家庭装",
    ),
    (
        "lighting=灯具",
        "desk lamp=台灯, floor lamp=落地灯, night light=小夜灯, string lights=灯串, lantern=提灯, "
        "wall lamp=壁灯, head torch=头灯, ceiling lamp=吸顶灯, picture light=画灯, bed lamp=床头灯, "
        "stair light=楼梯灯, fish lamp=鱼缸灯, clip lamp=夹灯, mirror light=镜前灯",
        "shade=灯罩: linen shade=亚麻灯罩, opal glass=乳白玻璃, rattan weave=藤编外壳, "
        "paper globe=纸质球罩, mesh cage=铁网罩",
        "control=控制: touch dimmer=触摸调光, pull cord=拉绳开关, remote control=遥控操作, "
        "motion sensor=人体感应, sunset timer=日落定时",
        "power=供电: usb rechargeable=充电使用, solar panel=太阳能板, mains plug=插电款, "
        "battery case=电池盒, crank dynamo=手摇发电",
        "light=光线: flicker free=无频闪, warm glow=暖光氛围, full spectrum=全光谱, glare shield=防眩光, "
        "focused beam=聚光照射",
        "brightness=亮度: 150 lm=一百五流明, 400 lumen=四百流明强, 900 high=九百高亮, ultra=超亮版",
    ),
    (
        "bedding=家纺",
        "pillow=枕头, duvet=被子, blanket=毛毯, bed sheet=床单, mattress topper=床褥, cushion=抱枕, "
        "sleeping mask=眼罩, quilt=拼布被, bath towel=浴巾, curtain=窗帘, bolster=靠垫, carpet=地毯, "
        "tablecloth=桌布, hammock=吊床",
        "fabric=面料: washed linen=水洗亚麻, long staple cotton=长绒棉布, mulberry silk=桑蚕丝, "
        "bamboo viscose=竹纤维, merino wool=美利奴羊毛",
        "pattern=花纹: plain dye=纯色, herringbone=人字纹, gingham check=格纹, botanical print=植物印花, "
        "fine stripe=细条纹",
        "feel=触感: cool touch=凉感, extra fluffy=蓬松, crisp finish=挺括, velvety nap=丝绒感, "
        "weighted fill=重力填充",
        "care=护理: machine washable=可机洗, wrinkle resistant=抗皱免烫, moth proof=防蛀处理, "
        "quick drying=速干, lint free=不掉毛",
        "size=尺寸: single=单人, double=双人, queen=一米八大床, cot=婴儿床用",
    ),
    (
        "stationery=文具",
        "notebook=笔记本, fountain pen=钢笔, desk organiser=桌面收纳, stapler=订书机, ruler=直尺, "
        "pencil case=笔袋, marker set=马克笔套装, sketchbook=速写本, calendar=日历, letter opener=拆信刀, "
        "stamp pad=印台, document folder=文件夹, sharpener=卷笔刀, clipboard=板夹",
        "body=外壳: brushed aluminium=拉丝铝, beech wood=榉木, recycled card=再生纸板, "
        "waxed canvas=油蜡帆布, clear acrylic=透明亚克力",
        "format=规格类型: pocket format=口袋型, desk format=桌用型, slim profile=纤薄款, "
        "tall layout=加高款, square layout=方形款",
        "use=适用: left handed use=左手适用, exam approved=考试专用, bullet journalling=手帐记录, "
        "technical drawing=工程制图, classroom pack=课堂教学",
        "detail=细节: numbered pages=带页码, elastic closure=松紧绑带, magnetic lid=磁吸盖, "
        "ink refill=附墨囊, name label=姓名贴",
        "pack=件数: one piece=单件, three set=三件组合, half dozen=半打装, gift box=礼盒",
    ),
    (
        "garden=园艺",
        "watering can=浇水壶, flower pot=花盆, hand trowel=手铲, garden hose=水管, bird feeder=喂鸟器, "
        "pruning shears=修枝剪, seed tray=育苗盘, compost bin=堆肥桶, trellis=花架, "
        "garden gloves=园艺手套, rain gauge=雨量筒, kneeler=跪垫, sprinkler=洒水器, plant stand=植物架",
        "material=材质: zinc steel=镀锌钢, terracotta=红陶, coconut fibre=椰壳纤维, cedar wood=雪松木, "
        "recycled rubber=再生橡胶",
        "weather=耐候: frost proof=防冻裂, uv stable=抗紫外线, rust free=不生锈, wind stable=防风加固, "
        "leak tested=防漏测试",
        "handling=操作: telescopic pole=伸缩杆, one hand lock=单手锁定, foldable frame=折叠架, "
        "ergonomic bend=人体工学弯柄, hanging loop=挂环",
        "suits=适合: balcony use=阳台种植, vegetable beds=菜园, orchid growing=兰花养护, "
        "greenhouse work=温室, children helping=亲子园艺",
        "volume=大小: mini=迷你, 2 litres=两升, 9 l=九升容量, jumbo=特大",
    ),
    (
        "pets=宠物用品",
        "dog bed=狗窝, cat tree=猫爬架, food bowl=食盆, leash=牵引绳, litter box=猫砂盆, "
        "pet carrier=宠物背包, grooming brush=梳毛刷, chew toy=磨牙玩具, water fountain=饮水机, "
        "hamster wheel=仓鼠跑轮, bird perch=鸟站架, pet coat=宠物衣服, scratch post=抓柱, "
        "aquarium net=捞鱼网",
        "material=材质: natural jute=天然黄麻, soft fleece=柔软抓绒, food grade steel=食品级钢, "
        "oak veneer=橡木贴面, dense felt=加厚毛毡",
        "safety=安全: bite proof=耐咬, reflective seam=反光缝线, rounded corners=圆角设计, "
        "non toxic dye=无毒染料, tip over guard=防翻倒",
        "hygiene=卫生: washable cover=外罩可洗, odour filter=除味滤芯, hair repelling=不粘毛, "
        "drip edge=防滴边, antibacterial=抗菌",
        "meant for=对象: senior animals=老年宠物, playful puppies=幼犬, shy cats=胆小猫咪, "
        "long haired breeds=长毛品种, travelling owners=外出携带",
        "size=型号: XS=超小型, M=中型, L=大型号, giant=巨型犬用",
    ),
    (
        "sports=运动",
        "yoga mat=瑜伽垫, skipping rope=跳绳, dumbbell=哑铃, water bottle=运动水壶, "
        "running belt=跑步腰包, swim goggles=泳镜, foam roller=泡沫轴, tennis racket=网球拍, "
        "climbing bag=攀岩包, cycling gloves=骑行手套, balance board=平衡板, ankle weight=沙袋绑腿, "
        "table tennis bat=乒乓球拍, resistance band=弹力带",
        "material=材质: cork surface=软木面, woven nylon=编织尼龙, cast iron core=铸铁芯, "
        "carbon layer=碳纤维层, natural rubber=天然橡胶",
        "grip=握感: dimpled grip=凹点防滑, towel wrap=毛巾缠绕, contour handle=贴手弧度, "
        "silicone dots=硅胶颗粒, wrist loop=腕绳",
        "carry=携带: roll up strap=捆扎带, mesh pouch=网袋, snap buckle=快扣, shoulder sling=斜挎, "
        "nesting design=叠放收纳",
        "level=水平: beginner friendly=新手友好, competition grade=比赛级, physio advised=康复推荐, "
        "outdoor training=户外训练, heavy duty=高强度",
        "weight=重量: 350 g=三百五十克, 0.9 kilo=接近一公斤, 2 kg=两千克, pro=专业加重",
    ),
    (
        "travel=旅行",
        "suitcase=行李箱, backpack=双肩包, neck pillow=颈枕, packing cubes=收纳袋, "
        "passport holder=护照夹, travel mug=随行杯, rain poncho=雨披, toiletry bag=洗漱包, "
        "luggage tag=行李牌, camping stool=折叠凳, money belt=防盗腰带, travel iron=旅行熨斗, "
        "umbrella=雨伞, dry bag=防水袋",
        "shell=外料: ripstop weave=防撕布, vegetable leather=植鞣皮, polycarbonate=聚碳酸酯, "
        "waxed cotton=油蜡棉, neoprene=氯丁胶",
        "closure=开合: roll top=卷口, two way zip=双向拉链, magnetic flap=磁扣盖, "
        "combination lock=密码锁, drawstring=抽绳",
        "comfort=舒适: padded straps=加厚肩带, breathable back=透气背板, silent wheels=静音轮, "
        "memory foam=记忆棉, soft handle=软提手",
        "extra=附加: hidden pocket=暗袋, cable port=充电口, name window=姓名窗, rain cover=防雨罩, "
        "shoe section=鞋仓",
        "volume=容积: cabin=登机款, 38 litres=三十八升, 65 l=六十五升大容量, expandable=可扩展",
    ),
    (
        "audio=影音",
        "headphones=头戴耳机, speaker=音箱, microphone=麦克风, record player=唱片机, radio=收音机, "
        "sound bar=条形音响, earbuds=入耳耳机, metronome=节拍器, karaoke set=唱歌套装, alarm clock=闹钟, "
        "voice recorder=录音笔, amplifier=功放, headphone stand=耳机架, audio cable=音频线",
        "build=做工: walnut veneer=胡桃木皮, knitted mesh=针织网面, anodised shell=阳极氧化壳, "
        "shock rubber=防震胶套, matte polymer=磨砂塑料",
        "link=连接: bluetooth pairing=蓝牙配对, optical input=光纤输入, usb c port=通用充电口, "
        "aux jack=圆孔插口, wifi streaming=无线网播放",
        "sound=音质: deep bass=低音下潜, clear dialogue=人声清晰, noise cancelling=主动降噪, "
        "studio flat=监听平直, wide stage=声场开阔",
        "extra=附加: splash proof=防泼溅, fast charging=快充, sleep timer=睡眠定时, foldable arms=折叠臂, "
        "spare pads=备用耳垫",
        "runtime=续航: 6 h=六小时, 18 hours=十八钟头, 40h long=四十个小时, wired=有线不限",
    ),
    (
        "toys=玩具",
        "puzzle=拼图, building blocks=积木, board game=桌游, kite=风筝, doll house=娃娃屋, "
        "toy train=小火车, marble run=滚珠轨道, hand puppet=手偶, bath toy=洗澡玩具, spinning top=陀螺, "
        "play tent=游戏帐篷, balance bike=平衡车, dominoes=多米诺骨牌, magic kit=魔术盒",
        "material=材质: maple wood=枫木, organic plush=有机毛绒, thick cardboard=厚纸板, "
        "soft silicone=软硅胶, plant plastic=植物基塑料",
        "theme=主题: deep sea=深海世界, space trip=太空旅行, forest animals=森林动物, old castle=古堡, "
        "busy city=繁忙都市",
        "teaches=锻炼: counting skills=数数能力, team play=团队合作, fine motor=精细动作, "
        "story telling=讲故事, logic steps=逻辑推理",
        "safety=安全: no small parts=无小零件, washable paint=可水洗颜料, smooth edges=边缘光滑, "
        "flame resistant=阻燃, saliva proof=防口水",
        "age=年龄: toddler=幼儿, 4 years=四岁起, 7 plus=七岁以上, teens=青少年",
    ),
    (
        "tools=工具",
        "screwdriver=螺丝刀, cordless drill=电钻, tape measure=卷尺, spirit level=水平尺, hammer=锤子, "
        "tool box=工具箱, hand saw=手锯, glue gun=胶枪, stud finder=探测仪, paint roller=滚筒刷, "
        "pliers=钳子, work bench=工作台, sanding block=打磨块, socket set=套筒组",
        "steel=钢材: chrome vanadium=铬钒钢, tungsten tip=钨尖, forged carbon=锻造碳钢, "
        "stainless jaw=不锈钳口, titanium coat=镀钛",
        "handle=手柄: ash handle=白蜡木柄, two tone grip=双色握把, t bar=丁字柄, hollow tube=空心管柄, "
        "pistol shape=枪式",
        "feature=功能: ratchet action=棘轮, magnetic pick up=磁性吸取, depth stop=限深, "
        "quick release=快拆, laser line=激光线",
        "works on=用于: drywall=石膏板, hardwood=硬木, masonry=砖石, sheet metal=薄铁皮, "
        "bicycle repair=修单车",
        "kit=配置: bare=裸机, starter=入门套, workshop=车间全套, site pro=工地专业",
    ),
    (
        "care=个人护理",
        "hair dryer=吹风机, hand cream=护手霜, shaving set=剃须套装, bath sponge=浴球, nail kit=美甲工具, "
        "soap dish=皂盒, face roller=脸部滚轮, comb=梳子, lip balm=润唇膏, toothbrush=牙刷, "
        "bath salts=浴盐, foot file=磨脚板, perfume bottle=香水瓶, massage ball=按摩球",
        "base=成分: shea butter=乳木果, green tea=绿茶, sea minerals=海洋矿物, oat milk=燕麦奶, "
        "cedar oil=雪松精油",
        "skin=肤质: sensitive skin=敏感肌, dry patches=干燥部位, oily zones=油性区域, mature needs=熟龄, "
        "athlete approved=运动人群",
        "scent=香味: unscented=无香, citrus zest=柑橘, lavender note=薰衣草, sandal warmth=檀香, "
        "mint breeze=薄荷",
        "promise=承诺: vegan formula=纯素配方, refill system=可替换装, plastic free=无塑包装, "
        "small batch=小批手作, dermatologist checked=皮肤科检测",
        "size=容量: sample=试用装, 60 ml=六十毫升, 220 g=二百二十克, salon=沙龙家用装",
    ),
)
"""Name, goods, four axes of attributes, and the option whose values have prices of their own."""


@dataclass(frozen=True, slots=True)
class Axis:
    """A question that goods answer in several ways."""

    name: str
    values: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Domain:
    """A department of the shop."""

    name: str
    goods: tuple[str, ...]
    axes: tuple[Axis, ...]
    """Attributes: one value of each per product."""
    sized: Axis
    """The option that changes the price, cheapest value first."""


@cache
def domains(language: str) -> tuple[Domain, ...]:
    """All departments in one language."""
    return tuple(
        Domain(
            _side(name, language),
            _sides(goods, language),
            tuple(_axis(axis, language) for axis in axes),
            _axis(sized, language),
        )
        for name, goods, *axes, sized in DOMAINS
    )


@cache
def colours(language: str) -> Axis:
    """The option that all goods have."""
    name, values = COLOURS
    return Axis(_side(name, language), _sides(values, language))


def _axis(text: str, language: str) -> Axis:
    name, _, values = text.partition(": ")
    return Axis(_side(name, language), _sides(values, language))


def _sides(text: str, language: str) -> tuple[str, ...]:
    return tuple(_side(pair, language) for pair in text.split(", "))


def _side(pair: str, language: str) -> str:
    english, chinese = pair.split("=")
    return (english if language == "en" else chinese).strip()
