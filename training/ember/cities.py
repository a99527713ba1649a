"""The cities that Ember knows: name, country, airport code, and the city centre in decimal degrees.

One row per city, from general knowledge. Codes and positions were checked against the airports of the `airportsdata` package, which is not a
dependency. Names are in plain ASCII. A city with several airports has the code of its busiest one. `corpus/facts.py` turns the table into questions.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class City:
    name: str
    country: str
    code: str
    latitude: float
    longitude: float

    @property
    def compass(self) -> str:
        """Return the city's position to the nearest degree, in the form of Ember's answers: `52°N, 5°E`."""
        return f"{compass_degrees(self.latitude, 'N', 'S')}, {compass_degrees(self.longitude, 'E', 'W')}"


def compass_degrees(degrees: float, positive: str, negative: str) -> str:
    nearest = round(degrees)
    return f"{abs(nearest)}°{positive if nearest >= 0 else negative}"


_ROWS = """
Amsterdam|the Netherlands|AMS|52.37|4.90
Brussels|Belgium|BRU|50.85|4.35
Luxembourg|Luxembourg|LUX|49.61|6.13
Paris|France|CDG|48.86|2.35
Lyon|France|LYS|45.76|4.84
Marseille|France|MRS|43.30|5.37
Nice|France|NCE|43.70|7.27
Toulouse|France|TLS|43.60|1.44
Bordeaux|France|BOD|44.84|-0.58
London|the United Kingdom|LHR|51.51|-0.13
Manchester|the United Kingdom|MAN|53.48|-2.24
Birmingham|the United Kingdom|BHX|52.48|-1.90
Edinburgh|the United Kingdom|EDI|55.95|-3.19
Glasgow|the United Kingdom|GLA|55.86|-4.25
Bristol|the United Kingdom|BRS|51.45|-2.59
Dublin|Ireland|DUB|53.35|-6.26
Cork|Ireland|ORK|51.90|-8.47
Berlin|Germany|BER|52.52|13.40
Hamburg|Germany|HAM|53.55|9.99
Munich|Germany|MUC|48.14|11.58
Frankfurt|Germany|FRA|50.11|8.68
Cologne|Germany|CGN|50.94|6.96
Stuttgart|Germany|STR|48.78|9.18
Dusseldorf|Germany|DUS|51.23|6.78
Vienna|Austria|VIE|48.21|16.37
Graz|Austria|GRZ|47.07|15.44
Zurich|Switzerland|ZRH|47.37|8.54
Geneva|Switzerland|GVA|46.20|6.14
Rome|Italy|FCO|41.90|12.50
Milan|Italy|MXP|45.46|9.19
Venice|Italy|VCE|45.44|12.33
Naples|Italy|NAP|40.85|14.27
Florence|Italy|FLR|43.77|11.26
Bologna|Italy|BLQ|44.49|11.34
Catania|Italy|CTA|37.50|15.09
Madrid|Spain|MAD|40.42|-3.70
Barcelona|Spain|BCN|41.39|2.17
Valencia|Spain|VLC|39.47|-0.38
Seville|Spain|SVQ|37.39|-5.99
Malaga|Spain|AGP|36.72|-4.42
Ibiza|Spain|IBZ|38.91|1.43
Lisbon|Portugal|LIS|38.72|-9.14
Porto|Portugal|OPO|41.16|-8.63
Copenhagen|Denmark|CPH|55.68|12.57
Stockholm|Sweden|ARN|59.33|18.07
Gothenburg|Sweden|GOT|57.71|11.97
Oslo|Norway|OSL|59.91|10.75
Bergen|Norway|BGO|60.39|5.32
Trondheim|Norway|TRD|63.43|10.40
Stavanger|Norway|SVG|58.97|5.73
Tromso|Norway|TOS|69.65|18.96
Helsinki|Finland|HEL|60.17|24.94
Rovaniemi|Finland|RVN|66.50|25.73
Reykjavik|Iceland|KEF|64.15|-21.94
Tallinn|Estonia|TLL|59.44|24.75
Riga|Latvia|RIX|56.95|24.11
Vilnius|Lithuania|VNO|54.69|25.28
Warsaw|Poland|WAW|52.23|21.01
Krakow|Poland|KRK|50.06|19.94
Gdansk|Poland|GDN|54.35|18.65
Wroclaw|Poland|WRO|51.11|17.03
Prague|Czechia|PRG|50.08|14.44
Bratislava|Slovakia|BTS|48.15|17.11
Budapest|Hungary|BUD|47.50|19.04
Ljubljana|Slovenia|LJU|46.06|14.51
Zagreb|Croatia|ZAG|45.81|15.98
Split|Croatia|SPU|43.51|16.44
Dubrovnik|Croatia|DBV|42.65|18.09
Sarajevo|Bosnia and Herzegovina|SJJ|43.86|18.41
Belgrade|Serbia|BEG|44.79|20.45
Podgorica|Montenegro|TGD|42.44|19.26
Skopje|North Macedonia|SKP|42.00|21.43
Tirana|Albania|TIA|41.33|19.82
Pristina|Kosovo|PRN|42.66|21.17
Athens|Greece|ATH|37.98|23.73
Thessaloniki|Greece|SKG|40.64|22.94
Heraklion|Greece|HER|35.34|25.14
Rhodes|Greece|RHO|36.44|28.22
Sofia|Bulgaria|SOF|42.70|23.32
Bucharest|Romania|OTP|44.43|26.10
Cluj|Romania|CLJ|46.77|23.60
Chisinau|Moldova|RMO|47.01|28.86
Kyiv|Ukraine|KBP|50.45|30.52
Lviv|Ukraine|LWO|49.84|24.03
Odesa|Ukraine|ODS|46.48|30.73
Minsk|Belarus|MSQ|53.90|27.57
Moscow|Russia|SVO|55.76|37.62
Kazan|Russia|KZN|55.79|49.12
Novosibirsk|Russia|OVB|55.03|82.92
Vladivostok|Russia|VVO|43.12|131.89
Valletta|Malta|MLA|35.90|14.51
Larnaca|Cyprus|LCA|34.92|33.63
Istanbul|Turkey|IST|41.01|28.98
Ankara|Turkey|ESB|39.93|32.86
Antalya|Turkey|AYT|36.90|30.70
Tbilisi|Georgia|TBS|41.72|44.79
Yerevan|Armenia|EVN|40.18|44.51
Baku|Azerbaijan|GYD|40.41|49.87
Tehran|Iran|IKA|35.69|51.39
Baghdad|Iraq|BGW|33.31|44.37
Erbil|Iraq|EBL|36.19|44.01
Beirut|Lebanon|BEY|33.89|35.50
Amman|Jordan|AMM|31.95|35.93
Tel Aviv|Israel|TLV|32.08|34.78
Riyadh|Saudi Arabia|RUH|24.71|46.68
Jeddah|Saudi Arabia|JED|21.49|39.19
Kuwait City|Kuwait|KWI|29.38|47.98
Manama|Bahrain|BAH|26.23|50.58
Doha|Qatar|DOH|25.29|51.53
Dubai|the United Arab Emirates|DXB|25.20|55.27
Abu Dhabi|the United Arab Emirates|AUH|24.45|54.38
Muscat|Oman|MCT|23.59|58.41
Almaty|Kazakhstan|ALA|43.24|76.89
Astana|Kazakhstan|NQZ|51.17|71.45
Tashkent|Uzbekistan|TAS|41.30|69.24
Samarkand|Uzbekistan|SKD|39.65|66.96
Bishkek|Kyrgyzstan|BSZ|42.87|74.59
Dushanbe|Tajikistan|DYU|38.56|68.79
Kabul|Afghanistan|KBL|34.53|69.17
Karachi|Pakistan|KHI|24.86|67.01
Lahore|Pakistan|LHE|31.55|74.34
Islamabad|Pakistan|ISB|33.68|73.05
Delhi|India|DEL|28.61|77.21
Mumbai|India|BOM|19.08|72.88
Bengaluru|India|BLR|12.97|77.59
Chennai|India|MAA|13.08|80.27
Kolkata|India|CCU|22.57|88.36
Hyderabad|India|HYD|17.39|78.49
Ahmedabad|India|AMD|23.02|72.57
Pune|India|PNQ|18.52|73.86
Jaipur|India|JAI|26.91|75.79
Goa|India|GOI|15.50|73.83
Varanasi|India|VNS|25.32|82.99
Colombo|Sri Lanka|CMB|6.93|79.86
Male|the Maldives|MLE|4.18|73.51
Kathmandu|Nepal|KTM|27.72|85.32
Dhaka|Bangladesh|DAC|23.81|90.41
Yangon|Myanmar|RGN|16.87|96.20
Bangkok|Thailand|BKK|13.76|100.50
Chiang Mai|Thailand|CNX|18.79|98.98
Phuket|Thailand|HKT|7.88|98.39
Vientiane|Laos|VTE|17.97|102.63
Siem Reap|Cambodia|SAI|13.36|103.86
Hanoi|Vietnam|HAN|21.03|105.85
Ho Chi Minh City|Vietnam|SGN|10.82|106.63
Da Nang|Vietnam|DAD|16.05|108.20
Kuala Lumpur|Malaysia|KUL|3.14|101.69
Singapore|Singapore|SIN|1.35|103.82
Jakarta|Indonesia|CGK|-6.21|106.85
Surabaya|Indonesia|SUB|-7.26|112.75
Denpasar|Indonesia|DPS|-8.65|115.22
Manila|the Philippines|MNL|14.60|120.98
Cebu|the Philippines|CEB|10.32|123.89
Hong Kong|China|HKG|22.32|114.17
Macau|China|MFM|22.20|113.55
Beijing|China|PEK|39.90|116.40
Shanghai|China|PVG|31.23|121.47
Guangzhou|China|CAN|23.13|113.26
Shenzhen|China|SZX|22.54|114.06
Chengdu|China|CTU|30.57|104.07
Chongqing|China|CKG|29.56|106.55
Wuhan|China|WUH|30.59|114.31
Nanjing|China|NKG|32.06|118.80
Hangzhou|China|HGH|30.27|120.16
Kunming|China|KMG|25.04|102.72
Harbin|China|HRB|45.80|126.53
Qingdao|China|TAO|36.07|120.38
Taipei|Taiwan|TPE|25.03|121.57
Seoul|South Korea|ICN|37.57|126.98
Busan|South Korea|PUS|35.18|129.08
Tokyo|Japan|HND|35.68|139.69
Osaka|Japan|KIX|34.69|135.50
Nagoya|Japan|NGO|35.18|136.91
Fukuoka|Japan|FUK|33.59|130.40
Sapporo|Japan|CTS|43.06|141.35
Hiroshima|Japan|HIJ|34.39|132.46
Naha|Japan|OKA|26.21|127.68
Ulaanbaatar|Mongolia|UBN|47.89|106.91
Sydney|Australia|SYD|-33.87|151.21
Melbourne|Australia|MEL|-37.81|144.96
Brisbane|Australia|BNE|-27.47|153.03
Perth|Australia|PER|-31.95|115.86
Adelaide|Australia|ADL|-34.93|138.60
Canberra|Australia|CBR|-35.28|149.13
Darwin|Australia|DRW|-12.46|130.84
Hobart|Australia|HBA|-42.88|147.33
Auckland|New Zealand|AKL|-36.85|174.76
Wellington|New Zealand|WLG|-41.29|174.78
Christchurch|New Zealand|CHC|-43.53|172.64
Suva|Fiji|SUV|-18.14|178.44
Port Moresby|Papua New Guinea|POM|-9.44|147.18
Noumea|New Caledonia|NOU|-22.27|166.44
Papeete|French Polynesia|PPT|-17.54|-149.57
Honolulu|the United States|HNL|21.31|-157.86
Anchorage|the United States|ANC|61.22|-149.90
New York|the United States|JFK|40.71|-74.01
Boston|the United States|BOS|42.36|-71.06
Washington|the United States|IAD|38.91|-77.04
Philadelphia|the United States|PHL|39.95|-75.17
Atlanta|the United States|ATL|33.75|-84.39
Miami|the United States|MIA|25.76|-80.19
Orlando|the United States|MCO|28.54|-81.38
Nashville|the United States|BNA|36.16|-86.78
New Orleans|the United States|MSY|29.95|-90.07
Houston|the United States|IAH|29.76|-95.37
Dallas|the United States|DFW|32.78|-96.80
Austin|the United States|AUS|30.27|-97.74
Chicago|the United States|ORD|41.88|-87.63
Detroit|the United States|DTW|42.33|-83.05
Pittsburgh|the United States|PIT|40.44|-80.00
Minneapolis|the United States|MSP|44.98|-93.27
Denver|the United States|DEN|39.74|-104.99
Salt Lake City|the United States|SLC|40.76|-111.89
Phoenix|the United States|PHX|33.45|-112.07
Las Vegas|the United States|LAS|36.17|-115.14
Los Angeles|the United States|LAX|34.05|-118.24
San Diego|the United States|SAN|32.72|-117.16
San Francisco|the United States|SFO|37.77|-122.42
Portland|the United States|PDX|45.52|-122.68
Seattle|the United States|SEA|47.61|-122.33
Vancouver|Canada|YVR|49.28|-123.12
Calgary|Canada|YYC|51.05|-114.07
Edmonton|Canada|YEG|53.55|-113.49
Toronto|Canada|YYZ|43.65|-79.38
Ottawa|Canada|YOW|45.42|-75.70
Montreal|Canada|YUL|45.50|-73.57
Mexico City|Mexico|MEX|19.43|-99.13
Guadalajara|Mexico|GDL|20.67|-103.35
Monterrey|Mexico|MTY|25.69|-100.32
Cancun|Mexico|CUN|21.16|-86.85
Guatemala City|Guatemala|GUA|14.63|-90.51
San Salvador|El Salvador|SAL|13.69|-89.22
Managua|Nicaragua|MGA|12.11|-86.24
Panama City|Panama|PTY|8.98|-79.52
Havana|Cuba|HAV|23.11|-82.37
Kingston|Jamaica|KIN|17.97|-76.79
Nassau|the Bahamas|NAS|25.05|-77.36
Santo Domingo|the Dominican Republic|SDQ|18.49|-69.93
San Juan|Puerto Rico|SJU|18.47|-66.11
Bridgetown|Barbados|BGI|13.10|-59.61
Bogota|Colombia|BOG|4.71|-74.07
Medellin|Colombia|MDE|6.24|-75.58
Cartagena|Colombia|CTG|10.39|-75.51
Caracas|Venezuela|CCS|10.48|-66.90
Quito|Ecuador|UIO|-0.18|-78.47
Guayaquil|Ecuador|GYE|-2.17|-79.92
Lima|Peru|LIM|-12.05|-77.04
Cusco|Peru|CUZ|-13.53|-71.97
La Paz|Bolivia|LPB|-16.49|-68.12
Asuncion|Paraguay|ASU|-25.26|-57.58
Montevideo|Uruguay|MVD|-34.90|-56.16
Buenos Aires|Argentina|EZE|-34.60|-58.38
Mendoza|Argentina|MDZ|-32.89|-68.84
Ushuaia|Argentina|USH|-54.80|-68.30
Santiago|Chile|SCL|-33.45|-70.67
Sao Paulo|Brazil|GRU|-23.55|-46.63
Rio de Janeiro|Brazil|GIG|-22.91|-43.17
Brasilia|Brazil|BSB|-15.79|-47.88
Salvador|Brazil|SSA|-12.97|-38.50
Fortaleza|Brazil|FOR|-3.73|-38.53
Manaus|Brazil|MAO|-3.12|-60.02
Cairo|Egypt|CAI|30.04|31.24
Alexandria|Egypt|HBE|31.20|29.92
Luxor|Egypt|LXR|25.69|32.64
Casablanca|Morocco|CMN|33.57|-7.59
Marrakesh|Morocco|RAK|31.63|-8.00
Tunis|Tunisia|TUN|36.81|10.18
Algiers|Algeria|ALG|36.75|3.06
Tripoli|Libya|MJI|32.89|13.19
Khartoum|Sudan|KRT|15.50|32.56
Addis Ababa|Ethiopia|ADD|9.03|38.74
Djibouti|Djibouti|JIB|11.59|43.15
Nairobi|Kenya|NBO|-1.29|36.82
Mombasa|Kenya|MBA|-4.04|39.66
Kampala|Uganda|EBB|0.35|32.58
Kigali|Rwanda|KGL|-1.95|30.06
Dar es Salaam|Tanzania|DAR|-6.79|39.21
Zanzibar|Tanzania|ZNZ|-6.17|39.20
Lusaka|Zambia|LUN|-15.39|28.32
Harare|Zimbabwe|HRE|-17.83|31.05
Maputo|Mozambique|MPM|-25.97|32.57
Antananarivo|Madagascar|TNR|-18.88|47.51
Port Louis|Mauritius|MRU|-20.16|57.50
Johannesburg|South Africa|JNB|-26.20|28.05
Cape Town|South Africa|CPT|-33.92|18.42
Durban|South Africa|DUR|-29.86|31.02
Windhoek|Namibia|WDH|-22.56|17.08
Gaborone|Botswana|GBE|-24.65|25.91
Luanda|Angola|LAD|-8.84|13.23
Kinshasa|Congo|FIH|-4.44|15.27
Libreville|Gabon|LBV|0.39|9.45
Douala|Cameroon|DLA|4.05|9.70
Lagos|Nigeria|LOS|6.52|3.38
Abuja|Nigeria|ABV|9.06|7.49
Accra|Ghana|ACC|5.60|-0.19
Abidjan|Ivory Coast|ABJ|5.36|-4.01
Dakar|Senegal|DSS|14.72|-17.47
Bamako|Mali|BKO|12.64|-8.00
Freetown|Sierra Leone|FNA|8.47|-13.23
Monrovia|Liberia|ROB|6.30|-10.80
""".strip()

CITIES: tuple[City, ...] = tuple(
    City(name, country, code, float(latitude), float(longitude))
    for name, country, code, latitude, longitude in (row.split("|") for row in _ROWS.splitlines())
)
